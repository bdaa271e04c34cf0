"""What a step's programs are given, packed into two arrays and taken apart again."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.batches import pack_batch, pack_sampling, unpack_batch, unpack_sampling
from engine.plan import LAST_SAMPLED, BatchRow, RowSampling
from engine.programs import SCORED_TOKENS, ProgramShape
from engine.types import AttemptId, SamplingParams, SequenceId

SHAPE = ProgramShape(tokens=12, seqs=4, blocks=5)
PLAIN = SamplingParams(temperature=0.25, top_k=7, top_p=0.9, min_p=0.05, seed=2**63 + 5)
SCORED = SamplingParams(
    temperature=0.0,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    repetition_penalty=1.25,
    seed=2**32 - 1,
    top_logprobs=0,
)


def row(
    name: str, tokens: tuple[int, ...], start: int, blocks: list[int], slot: int,
    sampling: RowSampling | None, targets: tuple[int, ...] = (),
) -> BatchRow:  # fmt: skip
    table = np.array(blocks, np.int32)
    return BatchRow(
        SequenceId(AttemptId(name, 0), 0), tokens, start, table, slot, sampling, targets
    )


ROWS = (
    row("a", (LAST_SAMPLED,), 17, [9, 8, 7, 6, 5], 3, RowSampling(PLAIN, 0, 18)),
    row("b", (4,), 0, [1], 0, RowSampling(SCORED, 2, 1, biases=4)),
    row("c", (5, 6, 7), 2, [2, 3], 1, None, (6, 7, 8)),
)


@pytest.fixture(params=["numpy", "traced"])
def traced(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "traced")


def test_a_batch_comes_out_as_it_went_in(traced: bool) -> None:
    unpack = functools.partial(unpack_batch, shape=SHAPE)
    (batch,), slots, targets = (jax.jit(unpack) if traced else unpack)(pack_batch(ROWS, SHAPE))
    assert batch.tokens.tolist() == [LAST_SAMPLED, 4, 5, 6, 7] + [0] * 7
    assert batch.starts.tolist() == [0, 1, 2, 5, 5]
    assert batch.kv_lens.tolist() == [18, 1, 5, 0]
    assert slots.tolist()[:3] == [3, 0, 1]
    assert batch.tables.tolist() == [[9, 8, 7, 6, 5], [1, 0, 0, 0, 0], [2, 3, 0, 0, 0], [0] * 5]
    assert (int(batch.num_rows), int(batch.num_single), int(batch.num_tokens)) == (3, 2, 5)
    assert all(part.dtype == np.int32 for part in (*batch, *targets))
    assert int(targets.count) == 3
    assert targets.places.tolist()[:3] == [2, 3, 4]
    assert targets.tokens.tolist()[:3] == [6, 7, 8]
    assert len(targets.tokens) == SHAPE.targets == SCORED_TOKENS


def test_one_token_rows_have_no_targets() -> None:
    shape = ProgramShape(tokens=4, seqs=4, blocks=5)
    (batch,), _, targets = unpack_batch(pack_batch(ROWS[:2], shape), shape)
    assert batch.tables.tolist()[1] == [1, 0, 0, 0, 0]
    assert (int(targets.count), len(targets.tokens)) == (0, 0)


def test_sampling_comes_out_as_it_went_in(traced: bool) -> None:
    unpack = functools.partial(unpack_sampling, seqs=4)
    params, kept, live = (jax.jit(unpack) if traced else unpack)(pack_sampling(ROWS, 4))
    assert int(live) == 3
    assert kept.tolist() == [3, 0, -1, -1]  # the third row's prompt goes on, the fourth is none
    assert params.temperature.tolist() == [0.25, 0.0, 0.0, 0.0]
    assert params.top_k.tolist() == [7, 0, 0, 0]
    assert params.top_p.tolist() == pytest.approx([0.9, 1, 1, 1])
    assert params.min_p.tolist() == pytest.approx([0.05, 0, 0, 0])
    assert params.presence.tolist() == [0, -0.5, 0, 0]
    assert params.frequency.tolist() == [0, 0.75, 0, 0]
    assert params.repetition.tolist() == [1, 1.25, 1, 1]
    assert params.seed.tolist() == [[2**31, 5], [0, 2**32 - 1], [0, 0], [0, 0]]
    assert params.choice.tolist() == [0, 2, 0, 0]
    assert params.position.tolist() == [18, 1, 0, 0]
    assert params.slot.tolist() == [-1, 0, -1, -1]  # of the penalized alone
    assert params.biases.tolist() == [0, 4, 0, 0]
    assert params.bias_slot.tolist()[1] == 0
    assert params.scored.tolist() == [False, True, False, False]
    assert params.temperature.dtype == np.float32
    assert params.seed.dtype == np.uint32
    assert params.scored.dtype == jnp.bool_
