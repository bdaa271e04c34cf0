"""The block pool: who owns each block of the KV cache. Plain Python, no jax.

A block has exactly one owner state at a time:

    FREE ──reserve──► RUNNING ──export──► EXPORTED
      ▲                  │                    │
      ├────────release───┴────────release─────┤
      └─finished── RETIRED ◄──release─────────┘

RUNNING blocks belong to a sequence that is being computed here; EXPORTED blocks hold KV
that another worker may still fetch and must not be overwritten. RETIRED blocks have no owner
any more, but a step that has been dispatched names them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence


class BlockState(enum.Enum):
    FREE = "free"
    RUNNING = "running"
    EXPORTED = "exported"
    RETIRED = "retired"


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was reserved."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._state = [BlockState.FREE] * num_blocks
        # A stack: the block released last is reserved first, while it is warm in cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._exported = 0
        self._retired: list[tuple[int, list[int]]] = []  # (the last step that names them, they)
        self._finished = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def exported(self) -> int:
        return self._exported

    @property
    def running(self) -> int:
        return self.num_blocks - len(self._free) - self._exported - self.retired

    @property
    def retired(self) -> int:
        return sum(len(blocks) for _, blocks in self._retired)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def reserve(self, count: int) -> list[int]:
        """Take `count` free blocks for a running sequence.

        Raises:
            OutOfBlocks: when fewer are free; the pool is unchanged.
        """
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} free")
        split = len(self._free) - count
        taken = self._free[split:][::-1]
        del self._free[split:]
        for block in taken:
            self._state[block] = BlockState.RUNNING
        return taken

    def export(self, blocks: Iterable[int]) -> None:
        """Turn RUNNING blocks into EXPORTED ones."""
        for block in blocks:
            self._move(block, BlockState.RUNNING, BlockState.EXPORTED)
            self._exported += 1

    def release(self, blocks: Sequence[int], last_step: int = 0) -> None:
        """Give RUNNING or EXPORTED blocks back, for when step `last_step` has `finished`.

        Raises:
            ValueError: a block is free or retired already: releasing twice is a fault of the
                caller, who must forget the blocks it has released.
        """
        for block in blocks:
            state = self._state[block]
            if state not in (BlockState.RUNNING, BlockState.EXPORTED):
                raise ValueError(f"block {block} released twice")
            if state is BlockState.EXPORTED:
                self._exported -= 1
            self._state[block] = BlockState.RETIRED
        self._retired.append((last_step, list(blocks)))
        self.finished(self._finished)

    def finished(self, step: int) -> None:
        """The devices have done all steps up to number `step`: they name no block any more."""
        self._finished = step
        retired, self._retired = self._retired, []
        for last_step, blocks in retired:
            if last_step > step:
                self._retired.append((last_step, blocks))
                continue
            for block in blocks:
                self._state[block] = BlockState.FREE
            self._free += blocks

    def _move(self, block: int, before: BlockState, after: BlockState) -> None:
        if self._state[block] is not before:
            raise ValueError(f"block {block} is {self._state[block].value}, not {before.value}")
        self._state[block] = after

    def check_invariants(
        self, running: Iterable[int], exported: Iterable[int], named: Iterable[int] = ()
    ) -> None:
        """Recount everything against what sequences say they own.

        Args:
            running, exported: every block owned by a sequence, by owner state.
            named: blocks that dispatched steps name.

        Raises:
            AssertionError: a block is lost, owned twice, or in the wrong state.
        """
        expected = dict.fromkeys(range(self.num_blocks), BlockState.FREE)
        retired = [block for _, blocks in self._retired for block in blocks]
        owners = (
            (BlockState.RUNNING, running),
            (BlockState.EXPORTED, exported),
            (BlockState.RETIRED, retired),
        )
        for state, blocks in owners:
            for block in blocks:
                assert expected[block] is BlockState.FREE, f"block {block} has two owners"
                expected[block] = state
        for block, state in expected.items():
            actual = self._state[block]
            assert actual is state, f"block {block} is {actual.value}, owners say {state.value}"
        free = [block for block, state in expected.items() if state is BlockState.FREE]
        assert sorted(self._free) == free, "the free list differs from the block states"
        assert self.free + self.running + self.exported + self.retired == self.num_blocks
        early = sorted(set(named) & set(free))
        assert not early, f"blocks {early} are free, and a dispatched step names them"
