"""Which kernels an engine runs: decided once, at start, and said in the log."""

from __future__ import annotations

import logging

from engine.kernels.interface import Kernels
from engine.kernels.reference import ReferenceKernels

log = logging.getLogger("hexserve.engine")


class KernelsUnavailable(RuntimeError):
    """The kernels that were asked for do not run here; says why."""


def choose_kernels(platform: str, asked: str) -> Kernels:
    """The kernels of `platform` ("cpu", "tpu", "gpu"), or those that were `asked` for.

    Args:
        asked: "auto", "reference" or "cpu". "auto" is the C++ kernels on CPU; where they are
            not built or the processor cannot run them, the reference, with a warning.

    Raises:
        KernelsUnavailable: "cpu" was asked for and does not run here, or the C++ kernels
            were built for another jaxlib.
    """
    kernels = _choose(platform, asked)
    log.info("kernels: %s", kernels.name)
    return kernels


def _choose(platform: str, asked: str) -> Kernels:
    if asked == "reference" or (asked == "auto" and platform != "cpu"):
        return ReferenceKernels(platform)
    if platform != "cpu":
        raise KernelsUnavailable(f"--kernels={asked}: the devices are {platform}")
    from engine.kernels.cpu import CpuKernels
    from engine.kernels.cpu.native import NoNativeKernels, WrongBuild

    try:
        return CpuKernels()
    except WrongBuild as error:
        raise KernelsUnavailable(str(error)) from error
    except NoNativeKernels as error:
        if asked == "cpu":
            raise KernelsUnavailable(f"--kernels=cpu: {error}") from error
        log.warning("slow reference kernels: %s", error)
        return ReferenceKernels(platform)
