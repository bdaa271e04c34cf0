"""Large buffers are used again after they were freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: the allocator's settings cannot be taken back.
PROGRAM = """
import resource, sys
from kvtransfer.heap import keep_freed_buffers
if "keep" in sys.argv:
    assert keep_freed_buffers()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def buffers():
    return [bytearray(b"x") * (3 << 20) for _ in range(5)]
buffers()
before = faults()
for _ in range(10):
    buffers()
print(faults() - before)
"""


def faults(*arguments: str) -> int:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_buffers_are_used_again() -> None:
    assert faults("keep") < faults() / 5
