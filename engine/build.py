"""Builds an engine for one worker: model folder and configuration in, Engine out."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches numpy the name bfloat16)
import numpy as np

from checkpoint.config import CheckpointConfig, read_config
from engine import fake
from engine.batching import derive_limits
from engine.block_hash import root_hash
from engine.blocks import BlockPool
from engine.engine import Engine
from engine.kv_memory import asks_device, choose_blocks, size_text, step_bytes
from engine.layer_needs import kv_needs, reach_of
from engine.limits import Limits
from engine.prefix_cache import PrefixCache
from engine.programs import SCORED_TOKENS, Extent, Paddings, TooManyPrograms, program_shapes
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.types import ModelLimits, Role
from settings.config import (
    BatchSizes,
    EngineConfig,
    ModelConfig,
    with_platform_defaults,
)
from settings.errors import ConfigError

log = logging.getLogger("hexserve.engine")

CHUNK_BYTES = 3 * 2**20
"""KV moves between workers in chunks of about this size: small beside a decode step.

Measured: through shared memory 16 MiB in chunks of half the size take as long, of a quarter a
fifth longer; gRPC moves 64 MiB no faster in chunks of two or three times the size.
"""
FAKE_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class KVArray:
    """One array of a token's KV, as it travels: [layers, tokens, heads, width]."""

    name: str
    dtype: str
    layers: int
    heads: int
    width: int

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.heads * self.width * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what others must know of it. `runner` is to be warmed up.

    `devices` are the engine's, in the order of its mesh; none for the fake model. Of
    `windowed_layers` the KV of what no query sees any more is not kept, but where `reach` is None.
    """

    engine: Engine
    runner: Runner
    limits: ModelLimits
    arrays: tuple[KVArray, ...]
    chunk_tokens: int
    devices: tuple[Any, ...] = ()
    windowed_layers: int = 0
    reach: int | None = None

    @property
    def platform(self) -> str:
        """jax's name for the kind of the devices."""
        return self.devices[0].platform if self.devices else "cpu"


def build_engine(
    folder: Path, model: ModelConfig, config: EngineConfig, roles: Role, first_device: int = 0
) -> BuiltEngine:
    """Load the model in `folder` onto this process's devices from number `first_device` on.

    Raises:
        CheckpointError, UnsupportedModel: the folder's fault; names file and field.
        ConfigError: the flags' fault, or more is asked than the devices have.
    """
    checkpoint = read_config(folder, model.generation_config)
    if checkpoint.model_type == fake.MODEL_TYPE:
        return _build_fake(checkpoint, model, config, roles)
    return _build_jax(checkpoint, folder, model, config, roles, first_device)


def _max_model_len(most: int, model: ModelConfig) -> int:
    """--max_model_len, or the `most` positions that the model has."""
    asked = model.max_model_len
    if asked is not None and asked > most:
        raise ConfigError(f"--max_model_len={asked}: the model has {most} positions")
    return asked or most


def _model_limits(
    checkpoint: CheckpointConfig, limits: Limits, pool: BlockPool, fingerprint: str
) -> ModelLimits:
    return ModelLimits(
        fingerprint=fingerprint,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        max_seqs=limits.max_seqs,
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
    )


def _cache(
    pool: BlockPool, config: EngineConfig, sizes: BatchSizes, described: ModelLimits
) -> PrefixCache | None:
    """The prefix cache, if there is to be one."""
    if not config.enable_prefix_cache_hbm:
        return None
    padding, block = sizes.prefill_len_padding, pool.block_size
    hit = math.lcm(padding, block)
    if hit > max(padding, block):
        raise ConfigError(
            f"--enable_prefix_cache_hbm: --prefill_len_padding={padding} and --block_size={block} "
            "do not fit each other: one must be a multiple of the other"
        )
    if hit >= described.max_model_len:
        log.warning(
            "prefixes are found in multiples of %d tokens, and no prompt has more than %d: "
            "nothing will be found",
            hit,
            described.max_model_len - 1,
        )
    return PrefixCache(pool, root_hash(described.fingerprint.encode()), hit)


def _chunk_tokens(arrays: tuple[KVArray, ...]) -> int:
    return max(2, CHUNK_BYTES // sum(array.bytes_per_token for array in arrays))


def _build_fake(
    checkpoint: CheckpointConfig, model: ModelConfig, config: EngineConfig, roles: Role
) -> BuiltEngine:
    arithmetic = (
        (config, EngineConfig(), ("tensor_parallel_size", "kv_cache_dtype", "kernels")),
        (model, ModelConfig(model.model), ("quantization", "sliding_window")),
    )
    for given, default, names in arithmetic:
        for name in names:
            if (value := getattr(given, name)) != getattr(default, name):
                raise ConfigError(f"--{name}={value}: the fake model does no arithmetic")
    sizes = with_platform_defaults(config, "cpu")
    vocab, blocks = checkpoint.vocab_size, config.num_blocks or FAKE_BLOCKS
    max_model_len = _max_model_len(checkpoint.max_position_embeddings, model)
    limits = derive_limits(roles, sizes, max_model_len, vocab, config)
    pool = BlockPool(blocks, config.block_size)
    runner = fake.FakeRunner(blocks, config.block_size, vocab)
    arrays = (KVArray("tokens", "int32", 1, 1, 1),)
    described = _model_limits(checkpoint, limits, pool, f"{fake.MODEL_TYPE}-{vocab}")
    engine = Engine(Scheduler(limits, pool, _cache(pool, config, sizes, described)), runner)
    return BuiltEngine(engine, runner, described, arrays, chunk_tokens=128)


def _build_jax(
    checkpoint: CheckpointConfig,
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    roles: Role,
    first_device: int,
) -> BuiltEngine:
    from engine import loading
    from engine.jax_runner import JaxRunner, PoolSpec
    from engine.model_choices import choose_dtype, with_flags
    from engine.models.rope import has_long_factors, stretched_length

    devices = _devices(config.tensor_parallel_size, first_device)
    platform = devices[0].platform
    sizes = with_platform_defaults(config, platform)
    checkpoint, traits = with_flags(checkpoint, model)
    dtype = choose_dtype(model.dtype, checkpoint, folder if model.needs_weights else None, platform)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    most = stretched_length(traits, checkpoint.max_position_embeddings)
    max_model_len = _max_model_len(most, model)
    limits = derive_limits(roles, sizes, max_model_len, traits.vocab, config)
    shapes = _shapes(roles, limits, sizes, config.block_size)
    placement = _placement(traits, devices, config.kernels, dtype, kv_dtype)

    arrays = tuple(
        KVArray(name, kv_dtype, traits.layers, traits.kv_heads, traits.head_dim) for name in "kv"
    )
    token_bytes = sum(array.bytes_per_token for array in arrays)
    # What one device holds: its share of the heads, replicated and empty ones included.
    device_bytes = token_bytes // traits.kv_heads * placement.shard.kv_heads * config.block_size
    reach = reach_of(traits, config, max_model_len)
    step = _step_bytes(placement.shard, shapes, limits, token_bytes)
    needs = kv_needs(traits, reach, device_bytes, step, limits, sizes, config.block_size, roles)
    if not asks_device(devices[0], config):
        choose_blocks(devices[0], needs, config)  # what cannot be is told before minutes of loading

    if not model.needs_weights:
        params = loading.dummy_params(
            placement, dtype, max_model_len, model.seed, model.quantization
        )
        source = f"dummy-{model.seed}"
    else:
        params = loading.load_params(folder, placement, dtype, max_model_len, model.quantization)
        source = loading.weights_identity(folder)

    blocks, windowed_blocks = choose_blocks(devices[0], needs, config)
    pool = BlockPool(blocks, config.block_size)
    windowed = BlockPool(windowed_blocks, config.block_size) if needs.windowed else None
    runner = JaxRunner(
        params,
        placement,
        PoolSpec(blocks, config.block_size, kv_dtype, windowed_blocks or None),
        shapes,
        max_seqs=limits.max_seqs,
        max_model_len=max_model_len,
        chunk_tokens=_chunk_tokens(arrays),
    )
    log.info(
        "KV cache: %d blocks of %d tokens, %d tokens, %s as %s on each of %d devices",
        blocks,
        config.block_size,
        blocks * config.block_size,
        size_text(blocks * needs.pool.block_bytes),
        kv_dtype,
        len(devices),
    )
    if needs.windowed is not None:
        log.info(
            "%d layers keep the last %d tokens alone, in %d blocks of their own, %s on each",
            len(traits.windowed_layers),
            reach,
            windowed_blocks,
            size_text(windowed_blocks * needs.windowed.block_bytes),
        )
    elif reach is not None:
        log.info("all layers keep the last %d tokens alone", reach)
    numerics = f"{dtype}, KV {kv_dtype}, quantization {model.quantization}"
    if has_long_factors(traits, max_model_len):
        numerics += ", long rope factors"
    fingerprint = loading.fingerprint(checkpoint.raw, numerics, source)
    described = _model_limits(checkpoint, limits, pool, fingerprint)
    cache = _cache(pool, config, sizes, described)
    return BuiltEngine(
        Engine(Scheduler(limits, pool, cache, reach, windowed), runner),
        runner,
        described,
        arrays,
        _chunk_tokens(arrays),
        tuple(devices),
        len(traits.windowed_layers),
        reach,
    )


def _devices(count: int, first: int) -> list[Any]:
    import jax

    devices = jax.local_devices()
    if len(devices) < first + count:
        others = f" beside the {first} of other workers" if first else ""
        raise ConfigError(
            f"--tensor_parallel_size={count}: {count} devices are needed{others}, this process "
            f"has {len(devices)} {devices[0].platform} devices"
        )
    return devices[first : first + count]


def _placement(traits: Any, devices: list[Any], kernels: str, dtype: str, kv_dtype: str) -> Any:
    from engine.kernels.choose import KernelsUnavailable, choose_kernels
    from engine.kernels.interface import UnsupportedShape
    from engine.models.heads import UnsupportedParallelism
    from engine.placing import plan_placement
    from engine.sharding import make_mesh

    try:
        chosen = choose_kernels(devices[0].platform, kernels)
        placement = plan_placement(traits, chosen, make_mesh(devices), dtype)
        chosen.pool_dtype(kv_dtype)
        return placement
    except UnsupportedShape as error:
        raise ConfigError(f"{error}; --kernels=reference computes it, slowly") from error
    except (KernelsUnavailable, UnsupportedParallelism) as error:
        raise ConfigError(str(error)) from error


def _shapes(roles: Role, limits: Limits, sizes: BatchSizes, block_size: int) -> Any:
    extent = Extent(
        max_prefill_tokens=limits.max_batch_tokens,
        max_prefill_seqs=sizes.max_prefill_seqs,
        max_decode_seqs=sizes.max_decode_seqs,
        max_blocks=-(-limits.max_model_len // block_size),
    )
    paddings = Paddings(
        prefill_len=sizes.prefill_len_padding,
        prefill_seqs=sizes.prefill_seqs_padding,
        decode_seqs=sizes.decode_seqs_padding,
        decode_blocks=sizes.decode_blocks_padding,
    )
    try:
        return program_shapes(roles, extent, paddings)
    except TooManyPrograms as error:
        raise ConfigError(str(error)) from error


def _step_bytes(shard: Any, shapes: Any, limits: Limits, token_bytes: int) -> int:
    """See engine.kv_memory; `shard` are the traits of one."""
    attention = (shard.heads + shard.kv_heads) * shard.head_dim
    return step_bytes(
        tokens=max(shape.tokens for shape in shapes),
        # Those of prompts' log-probabilities are there beside those of the sampled rows.
        rows=max(shape.seqs + min(shape.targets, SCORED_TOKENS) for shape in shapes),
        slots=limits.max_seqs,
        width=4 * shard.hidden + 2 * attention + 3 * shard.mlp_width,
        vocab=shard.vocab,
        chunk_bytes=max(CHUNK_BYTES, 2 * token_bytes),
    )
