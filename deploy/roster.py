"""The workers of a deployment on one machine: their names, roles and addresses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.types import COLOCATED, Role
from settings.config import Topology


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """A worker to be started; `address` as in `--address`."""

    name: str
    roles: Role
    address: str


def plan_workers(topology: Topology | None, folder: Path, replicas: int = 1) -> list[PlannedWorker]:
    """The workers of a topology, prefill first, each `replicas` times, with sockets in `folder`.

    None is workers that do both.
    """
    if topology is None:
        named = [(f"worker-{i}", COLOCATED) for i in range(replicas)]
    else:
        named = [(f"prefill-{i}", Role.PREFILL) for i in range(replicas * topology.prefill)]
        named += [(f"decode-{i}", Role.DECODE) for i in range(replicas * topology.decode)]
    return [PlannedWorker(name, roles, f"unix:{folder / name}.sock") for name, roles in named]
