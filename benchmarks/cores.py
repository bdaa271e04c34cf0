"""Which cores a process and those it starts may run on."""

import contextlib
import os
from collections.abc import Iterator, Set

from benchmarks.logged_process import StartError


def core_for_one() -> int:
    """A core that one process can have for itself, while the others are left to the rest.

    Raises:
        StartError: this process may use one core only, or cores cannot be chosen here.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(usable) < 2:
        raise StartError("two cores are needed that processes can be bound to")
    return max(usable)


@contextlib.contextmanager
def on_cores(cores: Set[int] | None) -> Iterator[None]:
    """The calling thread, and what it starts inside, run on `cores` alone; None changes nothing.

    What was started stays there.
    """
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def without_core(core: int) -> Iterator[None]:
    """As `on_cores`, of all that are usable but one."""
    with on_cores(os.sched_getaffinity(0) - {core}):
        yield
