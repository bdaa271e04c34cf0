"""What flags and config.json make of a model together: its dtype, its window, its traits."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from checkpoint.config import CheckpointConfig
from checkpoint.weights import open_weights
from engine.models.families import traits_of
from engine.models.traits import Traits, UnsupportedModel
from settings.config import ModelConfig
from settings.errors import ConfigError

log = logging.getLogger("hexserve.engine")

FLOATS = ("float32", "bfloat16", "float16")
"""The dtypes that weights and activations may have."""


def choose_dtype(
    asked: str, checkpoint: CheckpointConfig, folder: Path | None, platform: str
) -> str:
    """--dtype, or for "auto" the checkpoint's on accelerators, float32 on CPU.

    The checkpoint's is what config.json says, else that of most of the weights in `folder`
    (None: bfloat16, as for weights that are not read).

    Raises:
        ConfigError: float16 was asked for on TPU, which has none.
    """
    if asked == "float16" and platform == "tpu":
        raise ConfigError("--dtype=float16: TPUs compute in bfloat16 and float32")
    if asked != "auto":
        return asked
    if platform == "cpu":
        # As transformers computes by default there. bfloat16 is about twice as fast by the CPU
        # kernels, and several times slower by the reference.
        return "float32"
    stored = checkpoint.dtype
    if stored not in FLOATS:
        stored = "bfloat16" if folder is None else _dtype_of_most(folder)
    if stored == "float16" and platform == "tpu":
        log.warning("the checkpoint is float16, which TPUs do not have: computing in bfloat16")
        return "bfloat16"
    return stored


def _dtype_of_most(folder: Path) -> str:
    """Of FLOATS the dtype with the most bytes; bfloat16 where the weights are of others."""
    sizes = dict.fromkeys(FLOATS, 0)
    for info in open_weights(folder).names.values():
        if info.dtype.name in sizes:
            sizes[info.dtype.name] += info.nbytes
    most = max(FLOATS, key=lambda name: sizes[name])
    return most if sizes[most] else "bfloat16"


def with_flags(checkpoint: CheckpointConfig, model: ModelConfig) -> tuple[CheckpointConfig, Traits]:
    """`checkpoint` with --sliding_window in place of its own window, and the traits of that.

    Raises:
        UnsupportedModel: see engine.models.families.traits_of.
        ConfigError: --sliding_window for a model without one.
    """
    if model.trust_remote_code:
        log.warning("--trust_remote_code: no code of the model's repository is run")
    if model.sliding_window is None:
        return checkpoint, _traits(checkpoint.raw)
    raw = _set_window(checkpoint.raw, model.sliding_window)
    changed = _traits(raw)
    if all(kind.window is None for kind in changed.kinds):
        raise ConfigError(
            f"--sliding_window={model.sliding_window}: this model's layers have no window"
        )
    return dataclasses.replace(checkpoint, raw=raw), changed


def _set_window(raw: dict[str, Any], window: int) -> dict[str, Any]:
    text = raw.get("text_config")
    if isinstance(text, dict):
        return raw | {"text_config": text | {"sliding_window": window}}
    return raw | {"sliding_window": window}


def _traits(raw: dict[str, Any]) -> Traits:
    try:
        return traits_of(raw)
    except UnsupportedModel as error:
        if "auto_map" not in raw:
            raise
        raise UnsupportedModel(
            f"{error}. Its repository brings code for it (auto_map), which is not run, with or "
            "without --trust_remote_code"
        ) from error
