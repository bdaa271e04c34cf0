"""Progress of long work: a bar for a person at a terminal, lines for a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

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
