"""Which blocks hold the KV of which tokens: a prefix that several sequences share is computed once.

Full blocks are named by a chain of hashes (engine.block_hash). An entry is the parent of those
that go on from it, and a hit is a chain of entries from the first block on, each compared by its
tokens: equal hashes alone are not believed. Plain Python, no jax.

A sequence that refers to an entry's block refers to those of all its parents, and gives them back
together, the last one first; so the block that the pool evicts first is always a leaf.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.block_hash import block_pieces, chain_hashes
from engine.blocks import BlockPool
from engine.events import CacheChanged


@dataclass(slots=True, eq=False)
class Prefix:
    """What the cache knows of one sequence.

    Attributes:
        hashes, pieces: the names of its full blocks, and their tokens as bytes.
        shared: so many leading blocks of its table are in the cache.
        promised: it will compute the blocks up to this one; others may wait for them.
        closed: the name of its next block is another's: no more of them is added.
        wanted: others wait for so many of its tokens, or did.
        urgency: the best of their priorities.
        root: what comes before its first block; None: the cache's own root.
    """

    hashes: list[int] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    shared: int = 0
    promised: int = 0
    closed: bool = False
    wanted: int = 0
    urgency: int = 0
    root: int | None = None


@dataclass(slots=True, eq=False)
class _Entry:
    name: int
    block: int
    piece: bytes
    parent: _Entry | None
    children: int = 0

    def is_of(self, parent: _Entry | None, piece: bytes) -> bool:
        return self.parent is parent and self.piece == piece


class PrefixCache:
    """The blocks of `pool` that are kept, by name. Sets the pool's `on_evict`."""

    def __init__(self, pool: BlockPool, root: int, hit_tokens: int) -> None:
        """An empty cache.

        Args:
            root: see engine.block_hash.root_hash.
            hit_tokens: prompts are found in multiples of so many tokens, which are whole blocks.

        Raises:
            ValueError: `hit_tokens` are no whole blocks.
        """
        if hit_tokens < 1 or hit_tokens % pool.block_size:
            raise ValueError(f"{hit_tokens} tokens are no whole blocks of {pool.block_size}")
        self.hit_tokens = hit_tokens
        self._pool = pool
        self._root = root
        self._entries: dict[int, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._promises: dict[int, Prefix] = {}
        self._added: dict[int, None] = {}  # in their order, since the last take_changes
        self._evicted: dict[int, None] = {}
        pool.on_evict = self._forget

    @property
    def hashes(self) -> tuple[int, ...]:
        """The names of all that can be found; parents before their children."""
        return tuple(self._entries)

    def name(self, prefix: Prefix, tokens: Sequence[int]) -> None:
        """Name the full blocks of `tokens` that `prefix` does not know yet."""
        size, known = self._pool.block_size, len(prefix.hashes)
        if len(tokens) // size == known:
            return
        root = self._root if prefix.root is None else prefix.root
        fresh = block_pieces(tokens[known * size :], size)
        prefix.hashes += chain_hashes(fresh, prefix.hashes[-1] if known else root)
        prefix.pieces += fresh

    def find(self, prefix: Prefix, most: int) -> list[int]:
        """The blocks of its longest chain of entries, at most `most`, in token order."""
        found: list[int] = []
        parent: _Entry | None = None
        for name, piece in zip(prefix.hashes[:most], prefix.pieces, strict=False):
            entry = self._entries.get(name)
            if entry is None or not entry.is_of(parent, piece):
                break
            found.append(entry.block)
            parent = entry
        return found

    def promised(self, prefix: Prefix, start: int, most: int) -> int:
        """How far others will have computed its blocks from `start` on, at most to `most`."""
        while start < min(most, len(prefix.hashes)) and self.awaits(prefix.hashes[start]):
            start += 1
        return start

    def hurry(self, name: int, tokens: int, priority: int) -> None:
        """One of `priority` waits until its block of that name, up to token `tokens`, is added."""
        owner = self._promises[name]
        owner.urgency = min(owner.urgency, priority) if owner.wanted else priority
        owner.wanted = max(owner.wanted, tokens)

    def awaits(self, name: int) -> bool:
        """Whether a sequence is about to add the block of that name."""
        return name in self._promises and name not in self._entries

    def take(self, prefix: Prefix, found: Sequence[int]) -> None:
        """Refer to what has been found."""
        self._pool.share(found)
        prefix.shared = len(found)

    def promise(self, prefix: Prefix) -> None:
        """Its other full blocks will be computed here and added, or withdrawn."""
        prefix.promised = len(prefix.hashes)
        for name in prefix.hashes[prefix.shared :]:
            self._promises.setdefault(name, prefix)

    def withdraw(self, prefix: Prefix) -> None:
        """Nothing more will be added; idempotent."""
        for name in prefix.hashes[prefix.shared : prefix.promised]:
            self._keep_promise(name, prefix)
        prefix.promised = 0

    def add(self, prefix: Prefix, blocks: np.ndarray, count: int, last_step: int = 0) -> np.ndarray:
        """The KV of the first `count` blocks is complete: others may find it.

        Where another has added a block of the same tokens meanwhile, that one takes the place of
        the sequence's own, which goes back when step `last_step` has finished.

        Args:
            blocks: the sequence's block table, int32 [at least count].

        Returns:
            The table from now on: `blocks`, or another array.
        """
        at = prefix.shared
        parent = self._by_block[int(blocks[at - 1])] if at else None
        while at < count and not prefix.closed:
            name, piece, block = prefix.hashes[at], prefix.pieces[at], int(blocks[at])
            entry = self._entries.get(name)
            self._keep_promise(name, prefix)
            if entry is None:
                entry = _Entry(name, block, piece, parent)
                self._enter(entry)
            elif entry.is_of(parent, piece):
                self._pool.share([entry.block])
                self._pool.release([block], last_step)
                blocks = blocks.copy()
                blocks[at] = entry.block
            else:
                self.withdraw(prefix)
                prefix.closed = True
                break
            parent = entry
            at += 1
        prefix.shared = at
        return blocks

    def take_changes(self) -> CacheChanged | None:
        """What has been added and evicted since the last call; None: nothing."""
        if not self._added and not self._evicted:
            return None
        changed = CacheChanged(tuple(self._added), tuple(self._evicted))
        self._added.clear()
        self._evicted.clear()
        return changed

    def _enter(self, entry: _Entry) -> None:
        self._entries[entry.name] = self._by_block[entry.block] = entry
        if entry.parent is not None:
            entry.parent.children += 1
        self._pool.keep(entry.block)
        self._added[entry.name] = None

    def _forget(self, block: int) -> None:
        entry = self._by_block.pop(block)
        assert not entry.children, f"block {block} is evicted before those that go on from it"
        del self._entries[entry.name]
        if entry.parent is not None:
            entry.parent.children -= 1
        if entry.name in self._added:
            del self._added[entry.name]  # nobody was told of it
        else:
            self._evicted[entry.name] = None

    def _keep_promise(self, name: int, prefix: Prefix) -> None:
        if self._promises.get(name) is prefix:
            del self._promises[name]

    def check_invariants(self, prefixes: Collection[tuple[Prefix, Sequence[int]]]) -> None:
        """Recount entries and promises.

        Args:
            prefixes: of every sequence that owns blocks, with its block table.

        Raises:
            AssertionError: an entry has no chain, or what sequences share is not in the cache.
        """
        assert self._pool.kept == set(self._by_block), "the kept blocks are not the entries'"
        assert len(self._entries) == len(self._by_block)
        children = dict.fromkeys(self._entries, 0)
        for name, entry in self._entries.items():
            assert name == entry.name
            assert self._by_block[entry.block] is entry
            if entry.parent is not None:
                assert self._entries.get(entry.parent.name) is entry.parent, "no parent"
                children[entry.parent.name] += 1
        assert children == {name: entry.children for name, entry in self._entries.items()}
        for prefix, blocks in prefixes:
            for at in range(prefix.shared):
                entry = self._by_block[blocks[at]]
                assert entry.name == prefix.hashes[at], "another block is shared"
                assert entry.piece == prefix.pieces[at], "another block's tokens are shared"
        owners = {id(prefix) for prefix, _ in prefixes}
        for name, prefix in self._promises.items():
            assert id(prefix) in owners, "a promise of a sequence that is gone"
            assert name in prefix.hashes[prefix.shared : prefix.promised], "not promised"
