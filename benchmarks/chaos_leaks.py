"""What a process holds of the system, and what it holds too much of after a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

SEGMENT = "/memfd:hexserve-kv"
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Held:
    """Counts of one process. `segments` are mappings of shared memory that KV crosses in."""

    sockets: int = 0
    segments: int = 0
    descriptors: int = 0
    threads: int = 0


SPARE = Held(sockets=6, segments=0, descriptors=12, threads=8)
"""What a process may hold more of than at first: the pools of libraries grow with the load."""


def held_by(pid: int) -> Held | None:
    """What a process holds now; None when it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        maps = (folder / "maps").read_text()
        entries = os.listdir(folder / "fd")
        threads = len(os.listdir(folder / "task"))
    except OSError:
        return None
    sockets = 0
    for entry in entries:
        with contextlib.suppress(OSError):  # closed meanwhile
            sockets += os.readlink(folder / "fd" / entry).startswith("socket:")
    return Held(sockets, maps.count(SEGMENT), len(entries), threads)


def resident_bytes(pid: int) -> int | None:
    """The memory that a process has in use; None when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return None


def surplus(first: Mapping[str, Held], now: Mapping[str, Held]) -> list[str]:
    """What each named process holds of more than at first and SPARE."""
    return [
        f"{name} holds {getattr(held, each.name)} {each.name}, at first {getattr(then, each.name)}"
        for name, held in now.items()
        if (then := first.get(name)) is not None
        for each in fields(Held)
        if getattr(held, each.name) > getattr(then, each.name) + getattr(SPARE, each.name)
    ]
