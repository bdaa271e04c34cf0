"""The block pool: who owns each block of the KV cache. Plain Python, no jax.

A block has exactly one owner state at a time:

    FREE ──reserve──► RUNNING ──export──► EXPORTED
      ▲                  │                    │
      └────────release───┴────────release─────┘

RUNNING blocks belong to a sequence that is being computed here; EXPORTED blocks hold KV
that another worker may still fetch and must not be overwritten.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable


class BlockState(enum.Enum):
    FREE = "free"
    RUNNING = "running"
    EXPORTED = "exported"


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

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def exported(self) -> int:
        return self._exported

    @property
    def running(self) -> int:
        return self.num_blocks - len(self._free) - self._exported

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

    def release(self, blocks: Iterable[int]) -> None:
        """Give RUNNING or EXPORTED blocks back.

        Raises:
            ValueError: a block is free already: releasing twice is a fault of the caller,
                who must forget the blocks it has released.
        """
        for block in blocks:
            state = self._state[block]
            if state is BlockState.FREE:
                raise ValueError(f"block {block} released twice")
            if state is BlockState.EXPORTED:
                self._exported -= 1
            self._state[block] = BlockState.FREE
            self._free.append(block)

    def _move(self, block: int, before: BlockState, after: BlockState) -> None:
        if self._state[block] is not before:
            raise ValueError(f"block {block} is {self._state[block].value}, not {before.value}")
        self._state[block] = after

    def check_invariants(self, running: Iterable[int], exported: Iterable[int]) -> None:
        """Recount everything against what sequences say they own.

        Args:
            running, exported: every block owned by a sequence, by owner state.

        Raises:
            AssertionError: a block is lost, owned twice, or in the wrong state.
        """
        expected = dict.fromkeys(range(self.num_blocks), BlockState.FREE)
        for state, blocks in ((BlockState.RUNNING, running), (BlockState.EXPORTED, exported)):
            for block in blocks:
                assert expected[block] is BlockState.FREE, f"block {block} has two owners"
                expected[block] = state
        for block, state in expected.items():
            actual = self._state[block]
            assert actual is state, f"block {block} is {actual.value}, owners say {state.value}"
        free = [block for block, state in expected.items() if state is BlockState.FREE]
        assert sorted(self._free) == free, "the free list differs from the block states"
        assert self.free + self.running + self.exported == self.num_blocks
