"""The block pool: who owns each block of the KV cache. Plain Python, no jax.

A block has exactly one owner state at a time:

    FREE ──reserve──► RUNNING ──export──► EXPORTED
      ▲               ▲     │                │
      │             share   └──last release──┤
      │               │                      ▼
      ├─evict── CACHED ◄──finished, kept── RETIRED
      └───────────────────finished───────────┘

RUNNING blocks belong to sequences that are being computed here; EXPORTED blocks hold KV
that another worker may still fetch and must not be overwritten. RETIRED blocks have no owner
any more, but a step that has been dispatched names them. CACHED blocks have none either, and
hold KV that is worth keeping until their room is wanted.

Several sequences may share a block that is kept, to read it: each has a reference, and it is
RUNNING while one of them runs, EXPORTED while all of them are. It counts once.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockState(enum.Enum):
    FREE = "free"
    CACHED = "cached"
    RUNNING = "running"
    EXPORTED = "exported"
    RETIRED = "retired"


class OutOfBlocks(Exception):
    """Fewer blocks are free or cached than were asked for; nothing was reserved."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] = lambda _: None
        """Called with each block that is kept no more, because its room is wanted."""
        self._state = [BlockState.FREE] * num_blocks
        self._counts = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}
        # A stack: the block released last is reserved first, while it is warm in cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one to be evicted first, first
        self._kept: set[int] = set()
        self._references = [0] * num_blocks
        self._exporting = [0] * num_blocks  # of the references, those of exported sequences
        self._shares = 0  # references beside the first of each block
        self._last_step = [0] * num_blocks
        self._releases = [0] * num_blocks  # how often its last reference has been given back
        self._retired: list[tuple[int, int]] = []  # (block, which release), in their order
        self._finished = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """As many can be reserved now."""
        return len(self._free) + len(self._cached)

    @property
    def exported(self) -> int:
        return self._counts[BlockState.EXPORTED]

    @property
    def running(self) -> int:
        return self._counts[BlockState.RUNNING]

    @property
    def retired(self) -> int:
        return self._counts[BlockState.RETIRED]

    @property
    def kept(self) -> frozenset[int]:
        """The blocks whose KV is complete and worth keeping, with owners and without."""
        return frozenset(self._kept)

    @property
    def shares(self) -> int:
        """References that sequences have, less the blocks that they refer to."""
        return self._shares

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def is_cached(self, block: int) -> bool:
        """Whether it has no owner, and can be evicted."""
        return block in self._cached

    def reserve(self, count: int) -> list[int]:
        """Take `count` blocks for a running sequence; free ones first, then evicted ones.

        Raises:
            OutOfBlocks: when fewer are free or cached; the pool is unchanged.
        """
        if count > self.available:
            raise OutOfBlocks(
                f"{count} blocks wanted, {len(self._free)} free"
                + (f" and {len(self._cached)} cached" if self._cached else "")
            )
        while count > len(self._free):
            block, _ = self._cached.popitem(last=False)
            self._kept.remove(block)
            self._enter(block, BlockState.FREE)
            self._free.append(block)
            self.on_evict(block)
        split = len(self._free) - count
        taken = self._free[split:][::-1]
        del self._free[split:]
        for block in taken:
            self._references[block] = 1
            self._last_step[block] = 0
            self._enter(block, BlockState.RUNNING)
        return taken

    def keep(self, block: int) -> None:
        """Its KV is complete and worth keeping: it is shared from now on, and cached later."""
        assert self._references[block], f"block {block} has no owner"
        self._kept.add(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Refer to blocks that are kept, for one more running sequence.

        Raises:
            ValueError: a block is not kept: what it holds may change.
        """
        for block in blocks:
            if block not in self._kept:
                raise ValueError(f"block {block} is not kept")
            self._cached.pop(block, None)
            self._shares += self._references[block] > 0
            self._references[block] += 1
            self._enter(block, BlockState.RUNNING)

    def export(self, blocks: Iterable[int]) -> None:
        """Turn one reference to each of the RUNNING `blocks` into an exported sequence's."""
        for block in blocks:
            state = self._state[block]
            if state is not BlockState.RUNNING:
                raise ValueError(f"block {block} is {state.value}, not running")
            self._exporting[block] += 1
            self._settle(block)

    def release(self, blocks: Sequence[int], last_step: int = 0, *, exported: bool = False) -> None:
        """Give a reference to each of `blocks` back, for when step `last_step` has `finished`.

        Args:
            blocks: of one sequence, in token order: the last of them is evicted first.
            exported: the references are an exported sequence's.

        Raises:
            ValueError: there is no such reference: releasing twice is a fault of the caller, who
                must forget the blocks it has released.
        """
        for block in reversed(blocks):
            held = self._exporting[block]
            if not (held if exported else self._references[block] - held):
                raise ValueError(f"block {block} released twice")
            self._exporting[block] -= exported
            self._references[block] -= 1
            self._last_step[block] = max(self._last_step[block], last_step)
            if self._references[block]:
                self._shares -= 1
                self._settle(block)
                continue
            self._enter(block, BlockState.RETIRED)
            self._releases[block] += 1
            self._retired.append((block, self._releases[block]))
        self.finished(self._finished)

    def finished(self, step: int) -> None:
        """The devices have done all steps up to number `step`: they name no block any more."""
        self._finished = step
        retired, self._retired = self._retired, []
        for block, release in retired:
            if self._references[block] or release != self._releases[block]:
                continue  # shared since
            if self._last_step[block] > step:
                self._retired.append((block, release))
            elif block in self._kept:
                self._enter(block, BlockState.CACHED)
                self._cached[block] = None
            else:
                self._enter(block, BlockState.FREE)
                self._free.append(block)

    def _settle(self, block: int) -> None:
        """Say who owns a block with references."""
        running = self._references[block] > self._exporting[block]
        self._enter(block, BlockState.RUNNING if running else BlockState.EXPORTED)

    def _enter(self, block: int, state: BlockState) -> None:
        self._counts[self._state[block]] -= 1
        self._counts[state] += 1
        self._state[block] = state

    def check_invariants(
        self, running: Iterable[int], exported: Iterable[int], named: Iterable[int] = ()
    ) -> None:
        """Recount everything against what sequences say they own.

        Args:
            running, exported: every block owned by a sequence, by owner state; one that several
                share comes as many times.
            named: blocks that dispatched steps name.

        Raises:
            AssertionError: a block is lost, owned twice without being kept, or in the wrong state.
        """
        exporting = Counter(exported)
        references = Counter(running) + exporting
        retired = {
            block
            for block, release in self._retired
            if release == self._releases[block] and not self._references[block]
        }
        for block in range(self.num_blocks):
            count = references[block]
            assert count < 2 or block in self._kept, f"block {block} has two owners"
            if count > exporting[block]:
                expected = BlockState.RUNNING
            elif count:
                expected = BlockState.EXPORTED
            elif block in retired:
                expected = BlockState.RETIRED
            else:
                expected = BlockState.CACHED if block in self._kept else BlockState.FREE
            actual = self._state[block]
            assert actual is expected, (
                f"block {block} is {actual.value}, owners say {expected.value}"
            )
            assert self._references[block] == count, f"block {block}: references"
            assert self._exporting[block] == exporting[block], f"block {block}: exporting"
        assert self._shares == references.total() - len(references), "shares"
        assert self._counts == {s: self._state.count(s) for s in BlockState}, "counts"
        listed = {BlockState.FREE: self._free, BlockState.CACHED: self._cached}
        for state, blocks in listed.items():
            there = [block for block in range(self.num_blocks) if self._state[block] is state]
            assert sorted(blocks) == there, f"the {state.value} list differs from the block states"
        early = sorted(set(named) & {*self._free, *self._cached})
        assert not early, f"blocks {early} are free, and a dispatched step names them"
