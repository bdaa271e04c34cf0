"""Where a model's tensors come from: a checkpoint, or nothing; and what tells models apart."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoint.errors import CheckpointError
from checkpoint.tensor_reader import TensorReader, bytes_read
from checkpoint.weights import WeightFiles, open_weights
from engine.models.decoder import Params
from engine.models.stored import Index, Part, in_checkpoint, is_superfluous
from engine.models.traits import Traits
from engine.models.weights import declare_weights, stored_parts
from engine.placing import Placement, ReadTensor, place_params
from settings.config import GIB
from telemetry.progress import byte_progress

log = logging.getLogger("hexserve.engine")

_DUMMY_SCALE = 0.02
_COMPARED_ROWS = 64


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
    parts = stored_parts(placement.traits)
    spelled = in_checkpoint(files.names)
    _check_names(parts, spelled, files, folder, placement.traits)
    size = sum(bytes_read(files.info(spelled(part.tensor)), part.index) for part in parts.values())
    began = time.monotonic()
    with (
        byte_progress(size, "weights", log) as on_bytes,
        TensorReader(files, on_bytes) as reader,
    ):

        def read_part(tensor: str, index: Index) -> np.ndarray:
            return reader.read(spelled(tensor), index)

        def read(name: str) -> np.ndarray:
            return parts[name].take(read_part)

        params = place_params(placement, read, dtype, positions, quantization)
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
        for name in weight.source_names()
    }

    def read(name: str) -> np.ndarray:
        weight = declared[name]
        if weight.init != "normal":
            return np.full(weight.shape, 1.0 if weight.init == "ones" else 0.0, np.float32)
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        return generator.standard_normal(weight.shape, np.float32) * np.float32(_DUMMY_SCALE)

    return read


def _check_names(
    parts: Mapping[str, Part],
    spelled: Callable[[str], str],
    files: WeightFiles,
    folder: Path,
    traits: Traits,
) -> None:
    """Every tensor to load is there, of the right shape, and no other."""
    wanted = {spelled(part.tensor): part.shape for part in parts.values()}
    found = files.names
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} weights are missing: {_some(missing)}")
    left_over = {name for name in found.keys() - wanted.keys() if not is_superfluous(name)}
    head = spelled("lm_head.weight")
    if traits.tied and head in left_over:  # some tied checkpoints store it as well
        left_over.discard(head)
        _check_tied(files, head, spelled("model.embed_tokens.weight"), folder)
    if left_over:
        raise CheckpointError(
            f"{folder}: {len(left_over)} weights are left over, the model has no place for "
            f"them: {_some(sorted(left_over))}"
        )
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {found[name].shape}, config.json makes it {shape}"
            )


def _check_tied(files: WeightFiles, head: str, embedding: str, folder: Path) -> None:
    """What is trained apart is not tied, whatever config.json says; some rows show it."""
    one, other = files.read(head), files.read(embedding)
    rows = slice(None, None, max(1, len(other) // _COMPARED_ROWS))
    if not np.array_equal(one[rows], other[rows]):
        raise CheckpointError(
            f"{folder}: {head} is not {embedding}, as config.json says by tie_word_embeddings"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, …"
