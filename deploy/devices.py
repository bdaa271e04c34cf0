"""Which accelerators this host has, and which of them each worker process is given."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from settings.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The accelerators of a host; `count` 0 is a host whose workers run on its cores.

    `kind` is "tpu", "gpu" or "cpu".
    """

    kind: str
    count: int

    def environment_of(self, worker: int) -> dict[str, str]:
        """Variables that show worker number `worker` one device, and that as its only one.

        For TPU these are the settings by which libtpu runs one process per chip.
        """
        if self.kind == "tpu":
            return {
                "TPU_VISIBLE_CHIPS": str(worker),
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "TPU_PROCESS_BOUNDS": "1,1,1",
            }
        return {"CUDA_VISIBLE_DEVICES": str(worker)} if self.kind == "gpu" else {}

    def check_enough(self, workers: int) -> None:
        """Raise ConfigError when `workers` workers need more devices than there are."""
        if self.count and workers > self.count:
            raise ConfigError(
                f"--disagg_topo: {workers} workers need {workers} {self.kind} devices, "
                f"this host has {self.count}"
            )


def installed_backends() -> frozenset[str]:
    """The kinds of accelerator that the installed jax can drive."""
    plugins = " ".join(entry.name for entry in metadata.entry_points(group="jax_plugins"))
    kinds = {"tpu": find_spec("libtpu") is not None, "gpu": "cuda" in plugins}
    return frozenset(kind for kind, there in kinds.items() if there)


def find_accelerators(
    platforms: str, backends: frozenset[str], dev: Path = Path("/dev")
) -> Accelerators:
    """Count device files, without starting a runtime that would claim the devices.

    Args:
        platforms: JAX_PLATFORMS; one that names no accelerator leaves the cores.
        backends: see `installed_backends`.
    """
    wanted = {name.strip() for name in platforms.split(",") if name.strip()}
    tpus = len([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])
    gpus = len(list(dev.glob("nvidia[0-9]*")))
    if tpus and "tpu" in backends and (not wanted or "tpu" in wanted):
        return Accelerators("tpu", tpus)
    if gpus and "gpu" in backends and (not wanted or wanted & {"cuda", "gpu"}):
        return Accelerators("gpu", gpus)
    return Accelerators("cpu", 0)
