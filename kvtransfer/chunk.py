"""A piece of a transfer in its reader's hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtransfer.layout import ALL_LAYERS


class Chunk:
    """KV of tokens [start, stop), of all layers if `windowed`, else of those alone that see the
    whole context.

    `arrays` are read-only, one [layers, stop-start, heads, width] per `ArraySpec`, and may be
    views of shared memory that the source writes again: valid until `release()` or the
    fetch's `close`, whichever comes first. Copy out before, keep no view after. If the
    transport leaves KV on the devices they are the source's device arrays, maybe padded: the
    first stop-start tokens count.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        arrays: list[Any],
        on_release: Callable[[Chunk], None],
        group: int = ALL_LAYERS,
    ) -> None:
        self.start = start
        self.stop = stop
        self.arrays = arrays
        self.windowed = group == ALL_LAYERS
        self._on_release: Callable[[Chunk], None] | None = on_release

    def release(self) -> None:
        """Gives the chunk's memory back, and the source credit for one more. Idempotent.

        To be called on the fetch's loop.
        """
        if self._on_release is not None:
            on_release, self._on_release = self._on_release, None
            self.arrays = []
            on_release(self)
