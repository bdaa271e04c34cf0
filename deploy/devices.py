"""Which accelerators this host has, and which of them each worker process is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from settings.environment import VISIBLE_DEVICES
from settings.errors import ConfigError

_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""TPU chips of a process → how they lie on the host's grid."""


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The accelerators of a host; `count` 0 is a host whose workers run on its cores.

    `kind` is "tpu", "gpu" or "cpu"; `names` are what its variable calls them, numbers from 0
    where empty.
    """

    kind: str
    count: int
    names: tuple[str, ...] = ()

    def environment_of(self, worker: int, devices: int) -> dict[str, str]:
        """Variables that show worker number `worker` its own `devices` devices, and no other.

        For TPU these are the settings by which libtpu runs several processes on a host.
        """
        if self.kind not in VISIBLE_DEVICES:
            return {}
        numbers = range(worker * devices, (worker + 1) * devices)
        names = [self.names[n] if self.names else str(n) for n in numbers]
        shown = {VISIBLE_DEVICES[self.kind]: ",".join(names)}
        if self.kind == "tpu":
            bounds = _CHIP_BOUNDS[devices]
            shown |= {"TPU_CHIPS_PER_PROCESS_BOUNDS": bounds, "TPU_PROCESS_BOUNDS": "1,1,1"}
        return shown

    def check_divisible(self, devices: int) -> None:
        """Raise ConfigError when a process of its own cannot be given `devices` devices."""
        if self.kind == "tpu" and devices not in _CHIP_BOUNDS:
            raise ConfigError(
                f"--tensor_parallel_size={devices}: a process has "
                f"{', '.join(map(str, _CHIP_BOUNDS))} TPU chips"
            )

    def check_enough(self, workers: int, devices: int) -> None:
        """Raise ConfigError when there are not `devices` devices for each of `workers`."""
        if self.count and workers * devices > self.count:
            raise ConfigError(
                f"{workers} workers (--disagg_topo, --data_parallel_size) of {devices} devices "
                f"each (--tensor_parallel_size) need {workers * devices} {self.kind} devices, "
                f"this host {'lets us use' if self.names else 'has'} {self.count}"
            )


def installed_backends() -> frozenset[str]:
    """The kinds of accelerator that the installed jax can drive."""
    plugins = " ".join(entry.name for entry in metadata.entry_points(group="jax_plugins"))
    kinds = {"tpu": find_spec("libtpu") is not None, "gpu": "cuda" in plugins}
    return frozenset(kind for kind, there in kinds.items() if there)


def find_accelerators(
    platforms: str,
    backends: frozenset[str],
    visible: Mapping[str, tuple[str, ...]],
    dev: Path = Path("/dev"),
) -> Accelerators:
    """Count device files, without starting a runtime that would claim the devices.

    Args:
        platforms: JAX_PLATFORMS; one that names no accelerator leaves the cores.
        backends: see `installed_backends`.
        visible: kind → those that may be used, by name; all of a kind that is not there.
    """
    wanted = {name.strip() for name in platforms.split(",") if name.strip()}
    tpus = len([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])
    gpus = len(list(dev.glob("nvidia[0-9]*")))
    for kind, count, platform_names in (("tpu", tpus, {"tpu"}), ("gpu", gpus, {"cuda", "gpu"})):
        names = visible.get(kind, ())
        usable = len(names) if kind in visible else count
        if count and usable and kind in backends and (not wanted or wanted & platform_names):
            return Accelerators(kind, usable, names)
    return Accelerators("cpu", 0)
