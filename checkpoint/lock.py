"""A lock among the processes of this machine, for a folder that only one may fill."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("hexserve.checkpoint")


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of the file `path`, made where missing; waits while another process does.

    `what` completes "another process is …" in the log. A process that is killed lets go of it.

    Raises:
        OSError: the file cannot be made.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is %s, waiting for it", what)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks it
