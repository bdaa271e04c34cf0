"""What the devices are told of a sequence that a step computes. Plain Python, no jax."""

from __future__ import annotations

from engine.layer_groups import LayerGroup
from engine.plan import LAST_SAMPLED, BatchRow, RowSampling
from engine.sequence import Sequence
from engine.slot_loads import biases_at


def batch_row(sequence: Sequence, stop: int, groups: tuple[LayerGroup, ...]) -> BatchRow:
    """Its tokens [sequence.scheduled, stop), and that one is sampled if they are all there are."""
    start, choose = sequence.scheduled, None
    tokens = tuple(sequence.tokens[start:stop]) or (LAST_SAMPLED,)
    tables = [sequence.tables[each.index][: each.pool.blocks_for(stop)] for each in groups]
    if stop == sequence.length:
        biases = biases_at(sequence, stop)
        choose = RowSampling(sequence.sampling, sequence.id.choice, stop, biases)
    best = sequence.sampling.prompt_logprobs
    targets = () if best is None else sequence.request.prompt[start + 1 : stop + 1]
    return BatchRow(
        sequence.id, tokens, start, tables[0], sequence.slot, choose, targets, best or 0,
        tables[1] if len(tables) > 1 else None,
    )  # fmt: skip
