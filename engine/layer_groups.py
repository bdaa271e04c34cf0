"""Groups of layers by how far they see: the whole context, or a window of it. Plain Python.

Where a model has layers of both kinds, each group has a pool of blocks of its own, and a sequence
a block table in each. Both tables go by the same logical blocks: entry i stands for the tokens
[i * block_size, (i + 1) * block_size).

    entries of a windowed table    given back │ held, and seen from the next position on │ to come
                                   0 … sequence.given_back …                   len(table)

An entry that was given back goes on to name a block, which may be another's by now, or a later
entry's: no kernel looks at what lies before a window. Steps run in the order of their dispatch,
so a sequence may reuse such a block at once, but others only when the steps that saw it are done.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.blocks import BlockPool
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a pool.

    Attributes:
        index: which of a sequence's tables is theirs.
        reach: positions that a query sees at most, its own among them; None: all before it. A
            sequence has at most one table of a group with a reach.
    """

    pool: BlockPool
    index: int = 0
    reach: int | None = None

    def first_seen(self, position: int) -> int:
        """The first logical block that a query at `position`, or at a later one, sees."""
        if self.reach is None:
            return 0
        return max(0, position - self.reach + 1) // self.pool.block_size

    def most_seen(self, tokens: int, longest: int) -> int:
        """Blocks of a sequence of `longest` tokens that `tokens` of them, computed at once, see."""
        return most_seen(self.reach, self.pool.block_size, tokens, longest)

    def held(self, sequence: Sequence) -> np.ndarray:
        """The blocks that it owns, in token order."""
        table = sequence.tables[self.index]
        return table if self.reach is None else table[sequence.given_back :]

    def extend(self, sequence: Sequence, blocks: list[int]) -> None:
        """It has reserved some more."""
        more = np.array(blocks, np.int32)
        sequence.tables[self.index] = np.concatenate([sequence.tables[self.index], more])

    def reuse(self, sequence: Sequence, start: int, stop: int) -> int:
        """Let blocks that are not seen from position `start` on be those of tokens up to `stop`.

        Returns how many are lacking then.
        """
        table = sequence.tables[self.index]
        lacks = max(0, self.pool.blocks_for(stop) - len(table))
        if self.reach is None or not lacks:
            return lacks
        begin = sequence.given_back
        end = max(begin, min(self.first_seen(start), begin + lacks))
        sequence.tables[self.index] = np.concatenate([table, table[begin:end]])
        sequence.given_back = end
        return lacks - (end - begin)

    def give_back(self, sequence: Sequence, start: int) -> None:
        """Release its blocks that are not seen from position `start` on."""
        if self.reach is None:
            return
        first = min(self.first_seen(start), len(sequence.tables[self.index]))
        if first > sequence.given_back:
            unseen = sequence.tables[self.index][sequence.given_back : first]
            self.pool.release(unseen.tolist(), sequence.last_step)
            sequence.given_back = first

    def release(self, sequence: Sequence, *, exported: bool) -> None:
        """Release all its blocks; it must forget its tables."""
        blocks = self.held(sequence).tolist()
        self.pool.release(blocks, sequence.last_step, exported=exported)


def most_seen(reach: int | None, block_size: int, tokens: int, longest: int) -> int:
    """See LayerGroup.most_seen."""
    whole = -(-longest // block_size)
    if reach is None:
        return whole
    return min(whole, -(-(reach + tokens - 2) // block_size) + 1)


def all_kept(groups: tuple[LayerGroup, ...]) -> bool:
    """Sequences keep all their blocks to the end, so that others can begin with them."""
    return groups[-1].reach is None


def layer_groups(
    pool: BlockPool, reach: int | None = None, windowed: BlockPool | None = None
) -> tuple[LayerGroup, ...]:
    """One group, or two where the `windowed` layers have a pool beside the others'."""
    if windowed is None:
        return (LayerGroup(pool, 0, reach),)
    assert reach is not None
    return LayerGroup(pool), LayerGroup(windowed, 1, reach)
