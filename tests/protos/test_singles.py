"""Tokens that are told by numbers instead of names reach the router as they were."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types import AttemptId, FinishReason, SequenceId, TokenDelta, TokenLogprobs
from protos import worker_pb2 as wire
from protos.codec import WireError, decode_step
from protos.outbox import Outbox
from protos.singles_codec import MOST_NUMBERS, Names

A, B = SequenceId(AttemptId("a", 0), 0), SequenceId(AttemptId("b", 0), 0)


async def test_further_tokens_are_packed() -> None:
    outbox, names = Outbox(), Names()
    for index in range(3):
        deltas = tuple(TokenDelta(each, index, (7 + index,)) for each in (A, B))
        for delta in deltas:
            outbox.add_delta(delta)
        step = await outbox.take(10)
        assert len(step.tokens) == (0 if index else 2)
        assert len(step.singles.tokens) == (2 if index else 0)
        assert decode_step(step, names).deltas == deltas


@pytest.mark.parametrize(
    "more",
    [
        {"finish": FinishReason.STOP},
        {"logprobs": (TokenLogprobs(-1.0, (), ()),)},
        {"cached_tokens": 3},
        {"prefill_s": 0.5},
        {"tokens": (1, 2)},
        {"tokens": ()},
    ],
    ids=lambda more: next(iter(more)),
)
async def test_what_has_more_to_tell_is_told_whole(more: dict[str, object]) -> None:
    outbox, names = Outbox(), Names()
    outbox.add_delta(TokenDelta(A, 0, (5,)))
    decode_step(await outbox.take(10), names)
    delta = TokenDelta(A, 1, (6,))._replace(**more)  # type: ignore[arg-type]
    outbox.add_delta(delta)
    assert decode_step(await outbox.take(10), names).deltas == (delta,)


SEQUENCES = [
    SequenceId(AttemptId(name, number), choice)
    for name, number, choice in [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0)]
]
DEEDS = st.lists(
    st.tuples(st.sampled_from(SEQUENCES), st.integers(0, 2), st.booleans())
    | st.sampled_from([sequence.attempt for sequence in SEQUENCES])
    | st.none(),
    max_size=40,
)


@given(DEEDS)
def test_whatever_is_told_in_whatever_steps_arrives(
    deeds: list[tuple[SequenceId, int, bool] | AttemptId | None],
) -> None:
    """A deed: tokens of a sequence, the last or not; an attempt is forgotten; a step is taken."""

    async def play() -> None:
        outbox, names = Outbox(), Names()
        added: dict[SequenceId, list[int]] = {}
        arrived: dict[SequenceId, list[int]] = {}
        ends: list[SequenceId] = []
        ended: list[SequenceId] = []
        number = 0
        for deed in [*deeds, None]:
            if deed is None:
                for delta in decode_step(await outbox.take(0), names).deltas:
                    had = arrived.setdefault(delta.id, [])
                    assert delta.index == len(had)
                    had += delta.tokens
                    ended += [delta.id] * (delta.finish is not None)
            elif isinstance(deed, AttemptId):
                outbox.forget(deed)
            else:
                sequence, count, last = deed
                if sequence in ends:
                    continue
                had = added.setdefault(sequence, [])
                tokens = tuple(range(number, number + count))
                number += count
                finish = FinishReason.LENGTH if last else None
                outbox.add_delta(TokenDelta(sequence, len(had), tokens, finish=finish))
                had += tokens
                ends += [sequence] * last
        assert arrived == added
        assert sorted(ended) == sorted(ends)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (wire.Step(singles=wire.Singles(numbers=[3], indexes=[0], tokens=[1])), "number 3"),
        (wire.Step(singles=wire.Singles(numbers=[0], indexes=[0], tokens=[1])), "number 0"),
        (wire.Step(singles=wire.Singles(numbers=[1], tokens=[1])), "1 numbers, 0 indexes"),
        (
            wire.Step(tokens=[wire.Tokens(request_id="r", number=MOST_NUMBERS + 1)]),
            "sequence number",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(step: wire.Step, told: str) -> None:
    with pytest.raises(WireError, match=told):
        decode_step(step, {1: A})
