"""Loads the compiled CPU kernels, if this installation has them, and names them to XLA."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType
from typing import Any

import jax
import jaxlib

from engine.kernels.cpu.build_facts import headers_hash, sources_hash

log = logging.getLogger("hexserve.engine")

_PREFIX = "hexserve_"


class NoNativeKernels(RuntimeError):
    """The compiled kernels are not there, or this processor cannot run them; says why."""


class WrongBuild(RuntimeError):
    """The compiled kernels do not belong to this jaxlib or these sources; says how to rebuild."""


_REBUILD = (
    "rebuild them by `pip install scikit-build-core cmake ninja`, then by installing hexserve "
    "again with --no-build-isolation --no-deps --force-reinstall"
)


@cache
def load() -> ModuleType:
    """The native module, its handlers registered with XLA and the best instruction set chosen.

    One that multiplies a small product wrong is passed over, with a warning.

    Raises:
        NoNativeKernels: not built, or no instruction set of theirs runs here.
        WrongBuild: built for a jaxlib with another interface, or of other sources.
    """
    try:
        native = importlib.import_module("engine.kernels.cpu._native")
    except ImportError as error:
        raise NoNativeKernels(
            f"the CPU kernels are not built ({error}): install hexserve where a C++ compiler is"
        ) from error
    if native.jaxlib_hash != headers_hash():
        raise WrongBuild(
            f"the CPU kernels were built for jaxlib {native.jaxlib_version}, which differs from "
            f"jaxlib {jaxlib.__version__} here: {_REBUILD}"
        )
    if sources_hash() not in (None, native.sources_hash):
        raise WrongBuild(f"the CPU kernels' sources have changed since they were built: {_REBUILD}")
    names = native.instruction_sets()
    if not names:
        raise NoNativeKernels("the CPU kernels need AVX2 and FMA, this processor has not both")
    native.use_instruction_set(_first_right(native, names))
    for name, capsule in native.handlers().items():
        jax.ffi.register_ffi_target(_PREFIX + name, capsule, platform="cpu")
    return native


def _first_right(native: ModuleType, names: list[str]) -> str:
    for name in names:
        if native.self_check(name):
            return name
        log.warning("the CPU kernels for %s multiply wrong on this processor: not used", name)
    raise NoNativeKernels("the CPU kernels multiply wrong on this processor")


def target(name: str) -> str:
    """The name by which XLA knows the handler `name`."""
    return _PREFIX + name


def absent(dtype: Any) -> jax.Array:
    """What stands for an optional operand that is not there."""
    return jax.numpy.zeros((0,), dtype)
