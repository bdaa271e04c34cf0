"""Loads the compiled CPU kernels, if this installation has them, and names them to XLA."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import jax
import jaxlib

_PREFIX = "hexserve_"


class NoNativeKernels(RuntimeError):
    """The compiled kernels are not there, or this processor cannot run them; says why."""


class WrongBuild(RuntimeError):
    """The compiled kernels were built for another jaxlib; says how to rebuild them."""


@cache
def load() -> ModuleType:
    """The native module, its handlers registered with XLA and the best instruction set chosen.

    Raises:
        NoNativeKernels: not built, or no instruction set of theirs runs here.
        WrongBuild: built for a jaxlib of another version.
    """
    try:
        native = importlib.import_module("engine.kernels.cpu._native")
    except ImportError as error:
        raise NoNativeKernels(
            f"the CPU kernels are not built ({error}): install hexserve where a C++ compiler is"
        ) from error
    if native.built_for != jaxlib.__version__:
        raise WrongBuild(
            f"the CPU kernels were built for jaxlib {native.built_for}, this is jaxlib "
            f"{jaxlib.__version__}: rebuild them by installing hexserve again"
        )
    names = native.instruction_sets()
    if not names:
        raise NoNativeKernels("the CPU kernels need AVX2 and FMA, this processor has not both")
    native.use_instruction_set(names[0])
    for name, capsule in native.handlers().items():
        jax.ffi.register_ffi_target(_PREFIX + name, capsule, platform="cpu")
    return native


def target(name: str) -> str:
    """The name by which XLA knows the handler `name`."""
    return _PREFIX + name
