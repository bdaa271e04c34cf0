"""What a worker has still to tell one router of its cached blocks. Bounded; never waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set

from protos import worker_pb2 as wire
from protos.block_codec import PIECE_HASHES, BlockChanges, encode_changes, encode_piece

MAX_UNSENT_HASHES = 2**16
"""More unsent changes are forgotten for a snapshot: 512 KiB, far below a message's limit."""


class BlockFeed:
    """A snapshot in pieces, then changes; a snapshot again when they are too many.

        SNAPSHOT DUE ──take_piece──► IN PIECES ──last piece──► CHANGES
             ▲                           │                       │
             └───────────── restart, or too many changes ────────┘

    What changes while a snapshot is due is in it; what changes after its first piece, which fixes
    what it holds, is told after its last.
    """

    def __init__(self, cached: Set[int]) -> None:
        """`cached` is what the worker caches, and goes on to be."""
        self._cached = cached
        self._due = True
        self._pieces: deque[wire.CacheSnapshot] = deque()
        self._unsent: dict[int, bool] = {}  # hash → it was added, else evicted

    def restart(self) -> None:
        """Tell a snapshot again, after the pieces of one that has begun."""
        self._due = True
        self._unsent.clear()

    def change(self, added: Iterable[int], evicted: Iterable[int]) -> None:
        """`cached` has changed; each hash really did."""
        if self._due:
            return
        for hashes, is_added in ((evicted, False), (added, True)):
            for each in hashes:
                # One that came and went since the last message is not worth telling.
                if self._unsent.pop(each, is_added) is is_added:
                    self._unsent[each] = is_added
        if len(self._unsent) > MAX_UNSENT_HASHES:
            self.restart()

    @property
    def in_pieces(self) -> bool:
        """Whether a piece is to be sent now."""
        return self._due or bool(self._pieces)

    def take_piece(self) -> wire.CacheSnapshot | None:
        """The next piece of a snapshot; None when none is left."""
        if not self._pieces and self._due:
            self._due = False
            hashes = list(self._cached)
            for start in range(0, max(len(hashes), 1), PIECE_HASHES):
                stop = start + PIECE_HASHES
                self._pieces.append(encode_piece(hashes[start:stop], last=stop >= len(hashes)))
        return self._pieces.popleft() if self._pieces else None

    def take_changes(self) -> wire.BlockEvents | None:
        """All unsent changes; None when there are none, or pieces come first."""
        if not self._unsent or self.in_pieces:
            return None
        added = tuple(each for each, is_added in self._unsent.items() if is_added)
        evicted = tuple(each for each, is_added in self._unsent.items() if not is_added)
        self._unsent.clear()
        return encode_changes(BlockChanges(added, evicted))
