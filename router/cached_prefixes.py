"""How much of a prompt each worker of the fleet has cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine.block_hash import block_hashes, root_hash
from protos.block_codec import BlockChanges
from router.fleet import Fleet
from router.prefix_index import PrefixIndex
from router.worker import Worker

PLACES = ("prefill", "decode", "local", "colocated")
"""Where a choice finds cached tokens: with its prefill worker, its decode worker, a decode worker
that prefills by itself, or a colocated one."""


class CachedPrefixes:
    """Keeps the index of what workers tell of their cached blocks.

    Attributes:
        resyncs: how often a worker had to tell all of them again, for contradicting itself.
        asked_tokens, hit_tokens: place (one of PLACES) → tokens of the prompts that choices sent
            there, and how many of them were cached there.
    """

    def __init__(self, fleet: Fleet, index: PrefixIndex | None = None) -> None:
        self.index = PrefixIndex() if index is None else index
        self._fleet = fleet
        self._chained: Sequence[int] = ()
        self._chains: Mapping[int, Sequence[int]] = {}
        self._chains_of: tuple[str, frozenset[int]] = "", frozenset()
        self.resyncs = 0
        self.asked_tokens = dict.fromkeys(PLACES, 0)
        self.hit_tokens = dict.fromkeys(PLACES, 0)

    def snapshot(self, worker: Worker, hashes: Sequence[int]) -> None:
        """The worker caches exactly these."""
        if worker.row is not None:
            self.index.replace(worker.row, hashes)

    def changed(self, worker: Worker, blocks: BlockChanges) -> None:
        """Take in changes, or have the worker tell all again where they cannot be."""
        if worker.row is None or not blocks:  # nearly always none
            return
        if self.index.change(worker.row, blocks.added, blocks.evicted):
            return
        self.resyncs += 1
        worker.resync()

    def left(self, worker: Worker) -> None:
        """It is lost: nothing of what it held counts. Before its row is given back."""
        if worker.row is not None:
            self.index.forget(worker.row)

    def tokens(self, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
        """How many leading ones of `tokens` each worker has cached: [rows of the fleet].

        The last token never counts: its logits are needed.
        """
        rows = self._fleet.rows
        cached = np.zeros(rows, np.int64)
        if len(self.index):
            for size, chain in self.chains(tokens).items():
                np.maximum(cached, size * self.index.hits(chain, rows), out=cached)
        return cached

    def chains(self, tokens: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Block size of the fleet → the hashes of the blocks of all `tokens` but the last.

        Those of the last tuple are kept: the choices of a prompt ask for them one after another.
        """
        fleet = self._fleet
        of = fleet.fingerprint, fleet.block_sizes
        if tokens is self._chained and of == self._chains_of:
            return self._chains
        root = root_hash(fleet.fingerprint.encode())
        chains = {size: block_hashes(tokens[:-1], size, root) for size in fleet.block_sizes}
        if isinstance(tokens, tuple):
            self._chained, self._chains, self._chains_of = tokens, chains, of
        return chains

    def count(self, place: str, asked: int, hit: int) -> None:
        """A choice has sent a prompt of `asked` tokens to a place that has `hit` of them."""
        self.asked_tokens[place] += asked
        self.hit_tokens[place] += hit
