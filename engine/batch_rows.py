"""What the devices are told of a sequence that a step computes, and what they answer."""

from __future__ import annotations

import time

from engine.layer_groups import LayerGroup
from engine.plan import LAST_SAMPLED, BatchRow, RowSampling, StepOutcome
from engine.sequence import Sequence
from engine.slot_loads import biases_at
from engine.types import Role, TokenDelta


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


def take_token(
    sequence: Sequence, outcome: StepOutcome, cached: int, max_model_len: int
) -> TokenDelta:
    """Give it the token that was sampled for it; `cached`: see TokenDelta.cached_tokens."""
    request, index, token = sequence.request, sequence.output_count, outcome.tokens[sequence.id]
    prefilled = Role.PREFILL in request.roles and index == len(request.output)
    prefill_s = time.monotonic() - sequence.admitted if prefilled else 0.0
    sequence.unread -= 1
    sequence.tokens.append(token)
    finish = sequence.finish_after(token, max_model_len)
    logprobs = outcome.logprobs.get(sequence.id)
    scored = None if logprobs is None else (logprobs,)
    return TokenDelta(sequence.id, index, (token,), scored, finish, cached, prefill_s=prefill_s)
