"""Progress of long work: a bar for a person at a terminal, lines for a log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
    track,
)

from settings.config import GIB

_T = TypeVar("_T")

LINE_EVERY_S = 5.0


def progress(items: Sequence[_T], what: str, log: logging.Logger) -> Iterator[_T]:
    """Yield `items`, telling how far their consumer has come and how long it took."""
    began = told = time.monotonic()
    if sys.stderr.isatty():
        yield from track(items, what, console=Console(stderr=True), transient=True)
    else:
        for done, item in enumerate(items):
            if time.monotonic() - told > LINE_EVERY_S:
                told = time.monotonic()
                log.info("%s: %d of %d, %.0f s", what, done, len(items), told - began)
            yield item
    log.info("%s: %d of %d, %.1f s", what, len(items), len(items), time.monotonic() - began)


@contextmanager
def byte_progress(total: int, what: str, log: logging.Logger) -> Iterator[Callable[[int], None]]:
    """Yield a function to be told of bytes that have come, by any thread.

    Tells how many of `total` have come and how fast; the end is the caller's to tell.
    """
    began = told = time.monotonic()
    done = 0
    lock = threading.Lock()

    def lines(count: int) -> None:
        nonlocal done, told
        with lock:
            done += count
            now = time.monotonic()
            if now - told > LINE_EVERY_S:
                told = now
                rate = done / GIB / (now - began)
                log.info(
                    "%s: %.2f of %.2f GiB, %.2f GiB/s", what, done / GIB, total / GIB, rate
                )  # fmt: skip

    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
            TransferSpeedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
    else:
        yield lines
