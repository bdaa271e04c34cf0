"""What workers tell of cached blocks ↔ wire messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from protos import worker_pb2 as wire
from protos.errors import WireError

PIECE_HASHES = 2**15
"""The most hashes of one piece of a snapshot: 256 KiB, so that steps need not wait for long."""


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Hashes (unsigned 64 bits, see engine.block_hash) of blocks since the last changes."""

    added: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.evicted)


NO_CHANGES = BlockChanges()


def encode_changes(changes: BlockChanges) -> wire.BlockEvents:
    return wire.BlockEvents(added=changes.added, evicted=changes.evicted)


def decode_changes(message: wire.BlockEvents) -> BlockChanges:
    """The inverse of `encode_changes`. Whether they can be true is for whoever keeps an index."""
    if not (message.added or message.evicted):
        return NO_CHANGES
    return BlockChanges(tuple(message.added), tuple(message.evicted))


def encode_piece(hashes: Iterable[int], *, last: bool) -> wire.CacheSnapshot:
    return wire.CacheSnapshot(hashes=hashes, last=last)


class SnapshotReader:
    """Puts the pieces of a snapshot together."""

    def __init__(self, most: int) -> None:
        """`most`: how many hashes a worker can have, one for each of its blocks."""
        self._most = most
        self._hashes: list[int] = []

    def take(self, piece: wire.CacheSnapshot) -> list[int] | None:
        """All hashes with the last piece, None before; then a new snapshot may begin.

        Raises:
            WireError: there are more hashes than blocks.
        """
        self._hashes += piece.hashes
        if len(self._hashes) > self._most:
            raise WireError(f"a snapshot of {len(self._hashes)} hashes, {self._most} are the most")
        if not piece.last:
            return None
        hashes, self._hashes = self._hashes, []
        return hashes
