"""Process trees, of children made for it."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.process_tree import cpu_seconds, peak_memory, process_tree

CHILD = "import sys; kept = b'x' * (32 << 20); print('ready', flush=True); sys.stdin.read()"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=sys.stdin)
sum(range(6_000_000))
child.wait()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process with a child that holds 32 MiB; both end with their standard input."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate()


def test_a_tree_holds_the_child(parent: subprocess.Popen[str]) -> None:
    first, second = process_tree(parent.pid)
    assert first == parent.pid
    assert process_tree(second) == [second]


def test_memory_is_each_processes_own(parent: subprocess.Popen[str]) -> None:
    (_, small), (program, large) = peak_memory(parent.pid)
    assert program.startswith("python")
    assert large - small > 24 << 20


def test_cpu_time_is_the_trees(parent: subprocess.Popen[str]) -> None:
    _, child = process_tree(parent.pid)
    assert cpu_seconds(parent.pid) > 0
    assert cpu_seconds(parent.pid) >= cpu_seconds(child)


def test_a_process_that_is_gone_has_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert cpu_seconds(gone.pid) == 0
    assert peak_memory(gone.pid) == []
