"""Which accelerators this host has, and which of them each worker process is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from settings.environment import VISIBLE_DEVICES
from settings.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The accelerators of a host; `count` 0 is a host whose workers run on its cores.

    `kind` is "tpu", "gpu" or "cpu"; `names` are what its variable calls them, numbers from 0
    where empty.
    """

    kind: str
    count: int
    names: tuple[str, ...] = ()

    def environment_of(self, worker: int) -> dict[str, str]:
        """Variables that show worker number `worker` one device, and that as its only one.

        For TPU these are the settings by which libtpu runs one process per chip.
        """
        if self.kind not in VISIBLE_DEVICES:
            return {}
        one = {VISIBLE_DEVICES[self.kind]: self.names[worker] if self.names else str(worker)}
        if self.kind == "tpu":
            one |= {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
        return one

    def check_enough(self, workers: int) -> None:
        """Raise ConfigError when `workers` workers need more devices than there are."""
        if self.count and workers > self.count:
            raise ConfigError(
                f"--disagg_topo: {workers} workers need {workers} {self.kind} devices, "
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
