"""Log lines that a person can read."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def set_up_logging(level: str) -> None:
    """Log hexserve's own lines at `level` to standard error, and warnings of libraries."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("hexserve", "kvtransfer"):
        logging.getLogger(name).setLevel(level)
