"""Which worker holds which cached blocks, for the longest prefix hit of all workers at once.

A row per known block hash and in it a bit per worker: a chain's rows, AND-ed from the first on,
tell how far each worker goes along with it, whatever the number of workers.

The index holds what workers have told and no more than `max_blocks` hashes. Whatever is told
beyond them is left out until others are evicted: a hit is found too short, never too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

MAX_BLOCKS = 2**21
"""Hashes by default: about 0.13 KB each and a bit per worker, 0.5 GB with 1,000 workers."""

_FIRST_ROWS = 1024
_WORD_BITS = 64


class PrefixIndex:
    """Block hashes (64 bits, see engine.block_hash) → workers, who are small numbers from 0.

    A worker is followed from `replace` on, until `forget` or until it contradicts itself.

    Attributes:
        contradictions: how often workers were forgotten for what they told.
        left_out: how many hashes found no room, since the start.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._hashes = np.zeros(0, np.uint64)  # [rows]
        self._words = np.zeros((0, 1), np.uint64)  # [rows, workers / 64]
        self._unseen: dict[int, int] = {}  # worker followed → its hashes that were left out
        self.contradictions = 0
        self.left_out = 0

    def __len__(self) -> int:
        """How many hashes are known."""
        return len(self._rows)

    def follows(self, worker: int) -> bool:
        """Whether changes of `worker` are taken in."""
        return worker in self._unseen

    # ---- told by workers ----

    def replace(self, worker: int, hashes: Iterable[int]) -> None:
        """Take in a snapshot: `worker` holds these and nothing else. It is followed from now on."""
        self.forget(worker)
        if worker >= self._words.shape[1] * _WORD_BITS:
            self._widen(worker)
        self._unseen[worker] = 0
        self._add(worker, list(dict.fromkeys(hashes)))

    def change(self, worker: int, added: Sequence[int], evicted: Sequence[int]) -> bool:
        """Take in what has changed; ignored (True) while the worker is not followed.

        False: it contradicts what was told before, so something has been missed. The worker is
        forgotten and not followed before its next snapshot.
        """
        if worker not in self._unseen:
            return True
        told = {*added, *evicted}
        if (
            len(told) < len(added) + len(evicted)
            or self._held(worker, added).any()
            or not self._evict(worker, evicted)
        ):
            self.contradictions += 1
            self.forget(worker)
            return False
        self._add(worker, added)
        return True

    def forget(self, worker: int) -> None:
        """Drop all that `worker` holds and follow it no more; idempotent."""
        if self._unseen.pop(worker, None) is None:
            return
        byte, bit = _place(worker)
        column = self._bytes[:, byte]
        self._clear(np.flatnonzero(column & bit), byte, bit)

    # ---- asked by the router ----

    def hits(self, chain: Sequence[int], workers: int) -> npt.NDArray[np.int64]:
        """How many blocks from the start of `chain` on each worker below `workers` holds.

        `chain` are the hashes of a prompt's blocks in their order.
        """
        found = np.zeros(workers, np.int64)
        rows: list[int] = []
        find = self._rows.get
        for each in chain:
            row = find(each)
            if row is None:
                break
            rows.append(row)
        if not rows:
            return found
        holding = np.bitwise_and.accumulate(self._words.take(rows, axis=0), axis=0)
        # Few of its rows differ from the one before: only those are spread out to workers.
        differ = (holding[1:] != holding[:-1]).any(axis=1)
        last = np.array([*differ.nonzero()[0].tolist(), len(rows) - 1])
        bits = np.unpackbits(holding[last].view(np.uint8), axis=1, bitorder="little")
        blocks = last.astype(np.float32)  # floats multiply faster
        blocks[1:] -= blocks[:-1].copy()
        blocks[0] += 1
        known = bits[:, :workers].astype(np.float32)
        found[: known.shape[1]] = blocks @ known
        return found

    # ---- rows and bits ----

    @property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        """The words, where worker w is bit w % 8 of byte w // 8: words are little-endian."""
        return self._words.view(np.uint8)

    def _held(self, worker: int, hashes: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Of the known ones among `hashes`, which `worker` holds."""
        byte, bit = _place(worker)
        known = [row for each in hashes if (row := self._rows.get(each)) is not None]
        return (self._bytes[known, byte] & bit).astype(bool)

    def _add(self, worker: int, hashes: Sequence[int]) -> None:
        rows = [row for each in hashes if (row := self._row(each)) is not None]
        unseen = len(hashes) - len(rows)
        self._unseen[worker] += unseen
        self.left_out += unseen
        byte, bit = _place(worker)
        self._bytes[rows, byte] |= bit

    def _evict(self, worker: int, hashes: Sequence[int]) -> bool:
        """False, and nothing changed, if the worker cannot have held all of them."""
        held = int(self._held(worker, hashes).sum())
        unseen = len(hashes) - held
        if unseen > self._unseen[worker]:
            return False
        self._unseen[worker] -= unseen
        byte, bit = _place(worker)
        rows = [row for each in hashes if (row := self._rows.get(each)) is not None]
        self._clear(np.array(rows, np.intp), byte, bit)
        return True

    def _row(self, each: int) -> int | None:
        """The row of a hash, a new one if there is room."""
        row = self._rows.get(each)
        if row is not None or len(self._rows) == self._max_blocks:
            return row
        if not self._free:
            self._lengthen()
        row = self._rows[each] = self._free.pop()
        self._hashes[row] = each
        return row

    def _clear(self, rows: npt.NDArray[np.intp], byte: int, bit: np.uint8) -> None:
        """Take a worker's bit out of rows, and give back those that no worker holds any more."""
        self._bytes[rows, byte] &= ~bit
        empty = rows[~self._words[rows].any(axis=1)]
        for each in self._hashes[empty].tolist():
            del self._rows[each]
        self._free += empty.tolist()

    def _lengthen(self) -> None:
        rows = len(self._words)
        more = min(max(rows, _FIRST_ROWS), self._max_blocks - rows)
        self._hashes = np.concatenate([self._hashes, np.zeros(more, np.uint64)])
        self._words = np.pad(self._words, ((0, more), (0, 0)))
        self._free += range(rows + more - 1, rows - 1, -1)

    def _widen(self, worker: int) -> None:
        words = worker // _WORD_BITS + 1
        more = max(words - self._words.shape[1], self._words.shape[1])
        self._words = np.pad(self._words, ((0, 0), (0, more)))


def _place(worker: int) -> tuple[int, np.uint8]:
    """The byte of a worker in a row, and its bit there."""
    return worker >> 3, np.uint8(1 << (worker & 7))
