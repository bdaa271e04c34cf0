"""What a worker has still to tell: merged while unsent, bounded, never waited for."""

from __future__ import annotations

import asyncio

import pytest

from engine.types import (
    AttemptId,
    Failure,
    FailureCode,
    FinishReason,
    SequenceId,
    TokenDelta,
    TokenLogprobs,
)
from protos import outbox as module
from protos.codec import RejectedAttempt, decode_step
from protos.outbox import Outbox, OutboxFull

A, B = AttemptId("a", 0), AttemptId("b", 1)


def delta(attempt: AttemptId, index: int, *tokens: int, **fields: object) -> TokenDelta:
    return TokenDelta(SequenceId(attempt, 0), index, tokens, **fields)  # type: ignore[arg-type]


async def test_an_empty_outbox_gives_an_empty_step_after_a_while() -> None:
    step = await Outbox().take(0.0)
    assert step.ByteSize() == 0


async def test_everything_comes_in_one_step_and_once() -> None:
    outbox = Outbox()
    failure = Failure(B, FailureCode.TRANSFER, "why")
    outbox.add_delta(delta(A, 0, 1))
    outbox.add_failure(failure)
    outbox.add_rejected(AttemptId("c", 0), "full")
    update = decode_step(await outbox.take(10), {})
    assert update.deltas == (delta(A, 0, 1),)
    assert update.failures == (failure,)
    assert update.rejected == (RejectedAttempt(AttemptId("c", 0), "full"),)
    assert (await outbox.take(0.0)).ByteSize() == 0


async def test_unsent_deltas_of_a_sequence_merge() -> None:
    outbox = Outbox()
    first, second, third = (TokenLogprobs(-float(i), (i,), (-float(i),)) for i in range(3))
    outbox.add_delta(delta(A, 3, 10, logprobs=(first,)))
    outbox.add_delta(delta(B, 0, 20))
    outbox.add_delta(delta(A, 4, 11, 12, logprobs=(second, third), finish=FinishReason.STOP))
    update = decode_step(await outbox.take(10), {})
    whole = (first, second, third)
    assert set(update.deltas) == {
        delta(A, 3, 10, 11, 12, logprobs=whole, finish=FinishReason.STOP),
        delta(B, 0, 20),
    }


async def test_attempts_of_one_request_do_not_merge() -> None:
    outbox = Outbox()
    outbox.add_delta(delta(A, 0, 1))
    outbox.add_delta(delta(AttemptId("a", 1), 1, 2))
    assert len(decode_step(await outbox.take(10), {}).deltas) == 2


@pytest.mark.parametrize("item", ["delta", "failure", "rejected"])
async def test_news_wakes_the_waiting_stream(item: str) -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take(60))
    await asyncio.sleep(0)
    assert not taking.done()
    if item == "delta":
        outbox.add_delta(delta(A, 0, 1))
    elif item == "failure":
        outbox.add_failure(Failure(A, FailureCode.INTERNAL, ""))
    else:
        outbox.add_rejected(A, "")
    assert (await asyncio.wait_for(taking, 1)).ByteSize() > 0


async def test_unsent_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNSENT_TOKENS", 5)
    outbox = Outbox()
    outbox.add_delta(delta(A, 0, 1, 2, 3))
    outbox.add_delta(delta(B, 0, 1, 2))
    with pytest.raises(OutboxFull, match="6 tokens"):
        outbox.add_delta(delta(A, 3, 4))


async def test_what_was_taken_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNSENT_TOKENS", 5)
    outbox = Outbox()
    for index in range(0, 50, 5):
        outbox.add_delta(delta(A, index, 1, 2, 3, 4, 5))
        await outbox.take(10)
