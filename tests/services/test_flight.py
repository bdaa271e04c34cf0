"""Two streams become one: in order, without gaps, whatever comes late, twice or ahead."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types import (
    AttemptId,
    FinishReason,
    PromptLogprobs,
    SequenceId,
    TokenDelta,
    TokenLogprobs,
)
from router.flight import AttemptLost, Flight
from router.in_flight import InFlight
from router.prompt_scores import PromptScores


def delta(index: int, *tokens: int, finish: FinishReason | None = None) -> TokenDelta:
    logprobs = tuple(TokenLogprobs(-float(token)) for token in tokens)
    return TokenDelta(SequenceId(AttemptId("a", 0), 0), index, tokens, logprobs, finish)


def flight_of(first: int = 0) -> tuple[Flight, InFlight, InFlight]:
    prefill, decode = InFlight(), InFlight()
    return Flight((prefill, decode), first, 10, 10), prefill, decode


async def passed_on(flight: Flight) -> list[TokenDelta]:
    """What may be read without waiting."""
    return [await flight.next() for _ in range(len(flight._ready))]


def joined(deltas: list[TokenDelta], first: int = 0) -> list[int]:
    tokens: list[int] = []
    for each in deltas:
        assert each.index == first + len(tokens)
        assert each.logprobs == tuple(TokenLogprobs(-float(token)) for token in each.tokens)
        tokens += each.tokens
    return tokens


async def test_decode_may_be_ahead_of_prefill() -> None:
    flight, _, _ = flight_of()
    flight.deliver(delta(1, 11, 12))
    flight.deliver(delta(3, 13))
    assert await passed_on(flight) == []
    flight.deliver(delta(0, 10))
    assert joined(await passed_on(flight)) == [10, 11, 12, 13]


async def test_what_was_seen_is_dropped_and_what_overlaps_is_cut() -> None:
    flight, _, _ = flight_of(5)
    flight.deliver(delta(3, 13, 14))
    flight.deliver(delta(4, 14, 15, 16))
    flight.deliver(delta(5, 15))
    flight.deliver(delta(6, 16, 17, finish=FinishReason.STOP))
    deltas = await passed_on(flight)
    assert joined(deltas, 5) == [15, 16, 17]
    assert [d.finish for d in deltas] == [None, FinishReason.STOP]


async def test_a_shorter_repetition_does_not_replace_what_is_held() -> None:
    flight, _, _ = flight_of()
    flight.deliver(delta(1, 11, 12))
    flight.deliver(delta(1, 11))
    flight.deliver(delta(0, 10))
    assert joined(await passed_on(flight)) == [10, 11, 12]


async def test_a_failure_comes_after_what_was_delivered_before_it() -> None:
    flight, _, _ = flight_of()
    flight.deliver(delta(0, 10))
    flight.fail(AttemptLost("gone"))
    assert (await flight.next()).tokens == (10,)
    with pytest.raises(AttemptLost, match="gone"):
        await flight.next()


async def test_a_reader_waits_for_the_next_delta() -> None:
    flight, _, _ = flight_of()
    reader = asyncio.create_task(flight.next())
    await asyncio.sleep(0)
    assert not reader.done()
    flight.deliver(delta(0, 10))
    assert (await reader).tokens == (10,)


async def test_workers_count_their_flights() -> None:
    flight, prefill, decode = flight_of()
    assert (prefill.prefill_tokens, prefill.sequences) == (10, 1)
    assert (decode.prefill_tokens, decode.sequences) == (0, 1)
    flight.deliver(delta(0, 10))
    assert (prefill.prefill_tokens, prefill.sequences) == (0, 1)
    flight.land()
    assert (prefill.prefill_tokens, prefill.sequences) == (0, 0)
    assert (decode.prefill_tokens, decode.sequences) == (0, 0)


async def test_prefill_is_needed_until_decode_has_gone_on_from_the_first_token() -> None:
    flight, prefill, decode = flight_of(5)
    flight.deliver(delta(6, 16))  # the first token has not come: it may be lost yet
    assert flight.needs(prefill)
    flight.deliver(delta(5, 15))
    assert not flight.needs(prefill)
    assert flight.needs(decode)
    assert not flight.needs(InFlight())


async def test_prefill_is_needed_while_only_its_token_has_come() -> None:
    flight, prefill, _ = flight_of()
    flight.deliver(delta(0, 10))
    assert flight.needs(prefill)


async def test_a_colocated_worker_is_needed_to_the_end() -> None:
    worker = InFlight()
    flight = Flight((worker,), 0, 10, 10)
    flight.deliver(delta(0, 10, 11, 12))
    assert flight.needs(worker)


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[int, int, list[TokenDelta]]:
    """P's first token and D's others, D's cut anywhere, with pieces sent again at any time."""
    first = draw(st.integers(0, 5))
    count = draw(st.integers(1, 12))
    tokens = list(range(first, first + count))
    cuts = (
        sorted(draw(st.sets(st.integers(2, count), max_size=5)) | {1, count}) if count > 1 else []
    )
    decode = [
        delta(first + a, *tokens[a:b], finish=FinishReason.LENGTH if b == count else None)
        for a, b in itertools.pairwise(cuts)
    ]
    prefill = delta(first, tokens[0], finish=FinishReason.LENGTH if count == 1 else None)
    stream = list(decode)
    stream.insert(draw(st.integers(0, len(stream))), prefill)
    for again in draw(st.lists(st.sampled_from([prefill, *decode]), max_size=5)):
        # Whole, or cut short as it was before more was merged into it.
        kept = draw(st.integers(1, len(again.tokens)))
        finish = again.finish if kept == len(again.tokens) else None
        piece = delta(again.index, *again.tokens[:kept], finish=finish)
        stream.insert(draw(st.integers(0, len(stream))), piece)
    return first, count, stream


@given(interleavings())
def test_any_interleaving_gives_every_token_once(case: tuple[int, int, list[TokenDelta]]) -> None:
    first, count, stream = case

    async def check() -> None:
        flight, _, _ = flight_of(first)
        for each in stream:
            flight.deliver(each)
        deltas = await passed_on(flight)
        assert joined(deltas, first) == list(range(first, first + count))
        assert [d.finish is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]

    asyncio.run(check())


def scores(start: int, *logprobs: float) -> PromptLogprobs:
    own = np.array(logprobs, np.float32)
    none = np.zeros((len(own), 0), np.float32)
    return PromptLogprobs(delta(0).id, start, own, none.astype(np.int32), none)


async def test_tokens_wait_for_the_whole_prompts_log_probabilities() -> None:
    prefill, decode = InFlight(), InFlight()
    flight = Flight((prefill, decode), 0, 10, 10, PromptScores(4))
    flight.deliver(delta(1, 11, 12))
    flight.deliver(delta(0, 10))
    flight.deliver_prompt(scores(3, -3))
    flight.deliver_prompt(scores(3, -3))  # once more
    flight.deliver_prompt(scores(1, -1, -2))
    assert await passed_on(flight) == []
    assert flight.needs(prefill)
    flight.deliver_prompt(scores(4, -4))
    first, second = await passed_on(flight)
    assert joined([first, second]) == [10, 11, 12]
    assert first.prompt_logprobs.logprobs.tolist() == [-1, -2, -3, -4]
    assert second.prompt_logprobs is None
    assert not flight.needs(prefill)
    flight.deliver_prompt(scores(1, -9))
    assert await passed_on(flight) == []


async def test_a_prompt_of_one_token_has_no_log_probabilities_to_wait_for() -> None:
    flight = Flight((InFlight(), InFlight()), 0, 1, 1, PromptScores(0))
    flight.deliver(delta(0, 10))
    (first,) = await passed_on(flight)
    assert first.prompt_logprobs.logprobs.shape == (0,)
