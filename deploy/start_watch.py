"""Whether a worker that is not ready yet gets on, or hangs.

How long a start takes is anybody's guess: a large model loads for minutes, and so do programs
compile. But loading logs how far it is, and both use the processor.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LEAST_CPU_SHARE = 0.02
"""Of one core over the limit: an idle Python with gRPC uses a tenth of that."""


class StartWatch:
    """Tells when one process has shown no sign of life for `limit_s`: no line, no work done."""

    def __init__(self, pid: int, limit_s: float) -> None:
        self._pid = pid
        self._limit_s = limit_s
        self._lines = 0
        self._cpu_s = 0.0
        self._since = time.monotonic()

    def hangs(self, lines: int) -> bool:
        """To be asked now and then; `lines` have been logged since the start."""
        now, cpu_s = time.monotonic(), cpu_seconds(self._pid)
        if lines > self._lines or cpu_s - self._cpu_s > LEAST_CPU_SHARE * self._limit_s:
            self._lines, self._cpu_s, self._since = lines, cpu_s, now
        return now - self._since > self._limit_s


def cpu_seconds(pid: int) -> float:
    """What a process has used of the processors; 0 where it is gone or the system tells nothing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
