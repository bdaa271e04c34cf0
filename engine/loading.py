"""From a checkpoint, or from nothing, to the decoder's parameters on the devices."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from checkpoint.errors import CheckpointError
from checkpoint.weights import WeightFiles, open_weights
from engine.models.decoder import Params
from engine.models.traits import Traits
from engine.models.weights import IGNORED_SUFFIXES, Weight, declare_weights
from engine.sharding import sharding_of

log = logging.getLogger("hexserve.engine")

_DUMMY_SCALE = 0.02
_READERS = 4


def fingerprint(config: Mapping[str, Any], dtype: str, source: str) -> str:
    """Names a model and its numerics: equal on two workers exactly when their KV may be mixed.

    `source` tells weights of one configuration apart.
    """
    text = json.dumps([config, dtype, source], sort_keys=True)
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


def load_params(folder: Path, traits: Traits, dtype: Any, mesh: Mesh) -> Params:
    """Read, convert and place every weight.

    Raises:
        CheckpointError: a tensor is missing, left over or of the wrong shape; names it.
    """
    declared = declare_weights(traits)
    files = open_weights(folder)
    _check_names(declared, files, folder, traits)
    began, done = time.monotonic(), 0
    params: Params = {}
    with ThreadPoolExecutor(_READERS) as readers:
        for name, weight in declared.items():
            host = _read(weight, files, dtype, readers)
            params[name] = jax.device_put(host, sharding_of(weight.axes, mesh))
            done += host.nbytes
    jax.block_until_ready(params)
    seconds = time.monotonic() - began
    log.info("weights: %.2f GiB as %s in %.1f s", done / 2**30, jnp.dtype(dtype).name, seconds)
    return params


def dummy_params(traits: Traits, dtype: Any, mesh: Mesh, seed: int) -> Params:
    """Random weights of the right shapes (`--load_format dummy`), the same for one seed."""
    params: Params = {}
    for index, (name, weight) in enumerate(declare_weights(traits).items()):
        generator = np.random.default_rng([seed, index])
        if weight.init == "normal":
            host = generator.standard_normal(weight.shape, np.float32) * _DUMMY_SCALE
        else:
            host = np.full(weight.shape, 1.0 if weight.init == "ones" else 0.0, np.float32)
        params[name] = jax.device_put(host.astype(jnp.dtype(dtype)), sharding_of(weight.axes, mesh))
    return params


def _check_names(
    declared: Mapping[str, Weight], files: WeightFiles, folder: Path, traits: Traits
) -> None:
    wanted = {name: w for w in declared.values() for name in w.source_names()}
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
        if found[name].shape != weight.source_shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {found[name].shape}, "
                f"config.json makes it {weight.source_shape}"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, …"


def _read(
    weight: Weight, files: WeightFiles, dtype: Any, readers: ThreadPoolExecutor
) -> np.ndarray:
    """The whole weight on the host, in `dtype` and in the decoder's shape."""
    host = np.empty(weight.shape, jnp.dtype(dtype))
    targets = list(host) if weight.layered else [host]

    def fill(name: str, target: np.ndarray) -> None:
        tensor = files.read(name)
        target[...] = tensor.T if weight.transposed else tensor

    list(readers.map(fill, weight.source_names(), targets))
    return host
