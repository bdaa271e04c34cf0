"""Where a model's tensors come from: a checkpoint, or nothing; and what tells models apart."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoint.errors import CheckpointError
from checkpoint.tensor_reader import TensorReader
from checkpoint.weights import WeightFiles, open_weights
from engine.models.decoder import Params
from engine.models.traits import Traits
from engine.models.weights import IGNORED_SUFFIXES, Weight, declare_weights
from engine.placing import Placement, ReadTensor, place_params
from settings.config import GIB
from telemetry.progress import byte_progress

log = logging.getLogger("hexserve.engine")

_DUMMY_SCALE = 0.02


def fingerprint(config: Mapping[str, Any], numerics: str, source: str) -> str:
    """Names a model and its numerics: equal on two workers exactly when their KV may be mixed.

    `numerics` are the dtypes and the quantization; `source` tells weights of one configuration
    apart.
    """
    text = json.dumps([config, numerics, source], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weights_identity(folder: Path) -> str:
    """Tells two checkpoints of one configuration apart, without reading all their bytes."""
    files = open_weights(folder)
    digest = hashlib.sha256()
    for name, info in sorted(files.names.items()):
        digest.update(f"{name} {info.shape} {info.dtype}".encode())
        # The first bytes of each tensor: fine-tunes differ there in some tensor.
        digest.update(files.read(name).reshape(-1)[:64].tobytes())
    return digest.hexdigest()


def load_params(
    folder: Path, placement: Placement, dtype: Any, positions: int, quantization: str = "none"
) -> Params:
    """Read, convert and place every weight; see engine.placing.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape, or holds NaN
            or infinity; names it.
    """
    files = open_weights(folder)
    wanted = _check_names(declare_weights(placement.traits), files, folder, placement.traits)
    size = sum(files.info(name).nbytes for name in wanted)
    began = time.monotonic()
    with (
        byte_progress(size, "weights", log) as on_bytes,
        TensorReader(files, on_bytes) as reader,
    ):
        params = place_params(placement, reader.read, dtype, positions, quantization)
        jax.block_until_ready(params)
    seconds = time.monotonic() - began
    placed = sum(array.nbytes for array in jax.tree.leaves(params))
    stored = jnp.dtype(dtype).name if quantization == "none" else quantization
    log.info(
        "weights: %.2f GiB as %s in %.1f s, read at %.2f GiB/s",
        placed / GIB, stored, seconds, size / GIB / seconds,
    )  # fmt: skip
    return params


def dummy_params(
    placement: Placement, dtype: Any, positions: int, seed: int, quantization: str = "none"
) -> Params:
    """Random weights of the right shapes (`--load_format dummy`), the same for one seed."""
    tensors = dummy_tensors(placement.traits, seed)
    return place_params(placement, tensors, dtype, positions, quantization)


def dummy_tensors(traits: Traits, seed: int) -> ReadTensor:
    """A checkpoint of random tensors, each drawn from the seed and its name alone."""
    declared = {
        name: weight
        for weight in declare_weights(traits).values()
        for name in weight.source_names(traits.layers)
    }

    def read(name: str) -> np.ndarray:
        weight = declared[name]
        if weight.init != "normal":
            return np.full(weight.shape, 1.0 if weight.init == "ones" else 0.0, np.float32)
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        return generator.standard_normal(weight.shape, np.float32) * np.float32(_DUMMY_SCALE)

    return read


def _check_names(
    declared: Mapping[str, Weight], files: WeightFiles, folder: Path, traits: Traits
) -> Collection[str]:
    """The names of the tensors to load; every one is there, of the right shape."""
    wanted = {name: w for w in declared.values() for name in w.source_names(traits.layers)}
    found = files.names
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} weights are missing: {_some(missing)}")
    left_over = {n for n in found.keys() - wanted.keys() if not n.endswith(IGNORED_SUFFIXES)}
    if traits.tied:
        left_over.discard("lm_head.weight")  # some tied checkpoints store it as well
    if left_over:
        raise CheckpointError(
            f"{folder}: {len(left_over)} weights are left over, the model has no place for "
            f"them: {_some(sorted(left_over))}"
        )
    for name, weight in wanted.items():
        if found[name].shape != weight.shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {found[name].shape}, "
                f"config.json makes it {weight.shape}"
            )
    return wanted.keys()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, …"
