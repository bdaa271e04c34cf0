"""What Linux tells of a process and all that it has started: CPU time, peak memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def process_tree(root: int) -> list[int]:
    """The pids of `root` and its living descendants, `root` first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree += sorted(children.get(pid, ()))
    return tree


def cpu_seconds(root: int) -> float:
    """CPU time that a tree's living processes have used."""
    stats = [_stat(pid) for pid in process_tree(root)]
    return sum((int(stat[11]) + int(stat[12])) * _TICK_S for stat in stats if stat)


def peak_memory(root: int) -> list[tuple[str, int]]:
    """(what it runs, the most bytes it had in memory) for each process of a tree."""
    peaks = []
    for pid in process_tree(root):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    peaks.append((_program(arguments.split("\0")), int(line.split()[1]) * 1024))
    return peaks


def _program(arguments: list[str]) -> str:
    """The module of `python -m module`, else the program's name."""
    if "-m" in arguments[:-1]:
        return arguments[arguments.index("-m") + 1]
    return Path(arguments[0]).name


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, which may hold anything; None if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None
