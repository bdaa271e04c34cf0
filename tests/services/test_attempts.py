"""Attempts that are lost, rejected or handed over: what the next one is, and when there is none."""

from __future__ import annotations

import asyncio

import pytest

from engine.types import (
    Failure,
    FailureCode,
    FinishReason,
    Role,
)
from protos.codec import RejectedAttempt
from router import dispatch
from router.dispatch import MAX_LOST_ATTEMPTS
from router.errors import BadRequest, GenerationFailed, Overloaded
from tests.services.deployment import eventually
from tests.services.scene import FakeWorker, Scene, attempt, broken, delta


async def test_the_next_attempt_goes_on_from_what_was_told() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    await asking
    asking = await scene.ask()
    scene.dispatcher.lost(scene.decode, "it died")  # type: ignore[arg-type]
    await eventually(lambda: len(scene.prefill.orders) == 2)
    first, second = scene.prefill.orders
    (sequence,) = second.sequences
    assert second.attempt == attempt(1)
    assert (sequence.prompt, sequence.output) == ((1, 2), (5,))
    assert sequence.sampling == first.sequences[0].sampling
    assert second.transfer_id != first.transfer_id
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await scene.stream.aclose()
    assert scene.whole()


@pytest.mark.parametrize("first", ["p", "d"])
async def test_the_reason_counts_and_not_the_transfer_that_breaks_of_it(first: str) -> None:
    """One worker finds the request invalid; the other, here the faster, sees its end vanish."""
    scene = Scene()
    asking = await scene.ask()
    teller, other = (scene.prefill, scene.decode) if first == "d" else (scene.decode, scene.prefill)
    scene.tell(other, broken())
    scene.tell(teller, Failure(attempt(), FailureCode.INVALID, "too many KV blocks"))
    with pytest.raises(BadRequest, match="too many KV blocks"):
        await asking
    assert scene.whole()


async def test_a_rejection_behind_a_broken_transfer_is_a_rejection() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.decode, broken())
    scene.tell(scene.prefill, RejectedAttempt(attempt(), "full"))
    with pytest.raises(Overloaded):
        await asking
    assert scene.whole()


async def test_a_last_token_behind_a_broken_transfer_ends_the_stream() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.decode, broken())
    scene.tell(scene.prefill, delta(0, 0, 5, finish=FinishReason.STOP))
    assert (await asking).tokens == (5,)
    assert len(scene.prefill.orders) == 1
    assert scene.whole()


async def test_a_rejected_attempt_goes_to_another_and_is_not_a_lost_one() -> None:
    others = [FakeWorker(f"p{i}", Role.PREFILL) for i in range(4)]
    scene = Scene(*others)
    asking = await scene.ask()
    prefills = [scene.prefill, *others]
    for number in range(4):  # more than attempts may be lost
        (worker,) = [w for w in prefills if w.orders and w.orders[-1].attempt == attempt(number)]
        scene.tell(worker, RejectedAttempt(attempt(number), "full"))
        await eventually(lambda n=number + 2: sum(len(w.orders) for w in prefills) == n)
    assert all(len(worker.orders) == 1 for worker in prefills)
    (worker,) = [w for w in prefills if w.orders[-1].attempt == attempt(4)]
    scene.tell(worker, delta(4, 0, 5))
    assert (await asking).tokens == (5,)
    await scene.stream.aclose()
    assert scene.whole()


@pytest.mark.parametrize("code", [FailureCode.INTERNAL, FailureCode.TRANSFER])
async def test_so_many_lost_attempts_in_a_row_are_an_error(
    code: FailureCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "TRANSFER_GRACE_S", 0.001)
    scene = Scene()
    asking = await scene.ask()
    for number in range(MAX_LOST_ATTEMPTS):
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.tell(scene.decode, Failure(attempt(number), code, f"no {number}"))
    with pytest.raises(GenerationFailed, match=f"no {MAX_LOST_ATTEMPTS - 1}"):
        await asyncio.wait_for(asking, 1)
    assert scene.whole()
    assert scene.prefill.aborted == [attempt(n) for n in range(MAX_LOST_ATTEMPTS)]


async def test_how_many_attempts_may_be_lost_is_the_dispatchers_to_say() -> None:
    scene = Scene(max_lost_attempts=2)
    asking = await scene.ask()
    for number in range(2):
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.tell(scene.decode, Failure(attempt(number), FailureCode.INTERNAL, f"no {number}"))
    with pytest.raises(GenerationFailed, match="2 attempts were lost, the last: no 1"):
        await asking
    assert scene.whole()


async def test_an_attempt_that_made_progress_begins_a_new_row_of_lost_ones() -> None:
    scene = Scene(max_tokens=19)
    asking = await scene.ask()
    for number in range(MAX_LOST_ATTEMPTS):  # two tokens each, then the loss
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.tell(scene.prefill, delta(number, 2 * number, 5))
        scene.tell(scene.decode, delta(number, 2 * number + 1, 6))
        assert (await asking).tokens == (5,)
        assert (await anext(scene.stream)).tokens == (6,)
        asking = await scene.ask()
        scene.tell(scene.decode, Failure(attempt(number), FailureCode.INTERNAL, "why"))
    await eventually(lambda: len(scene.decode.orders) == MAX_LOST_ATTEMPTS + 1)
    scene.tell(
        scene.prefill, delta(MAX_LOST_ATTEMPTS, 2 * MAX_LOST_ATTEMPTS, 7, finish=FinishReason.STOP)
    )
    assert (await asking).tokens == (7,)
    assert scene.whole()


async def test_a_first_token_alone_is_no_progress() -> None:
    """A decode worker that always fails must not cost a prefill for every token."""
    scene = Scene(max_tokens=9)
    asking = await scene.ask()
    for number in range(MAX_LOST_ATTEMPTS):
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.tell(scene.prefill, delta(number, number, 5))
        assert (await asking).tokens == (5,)
        asking = await scene.ask()
        scene.tell(scene.decode, Failure(attempt(number), FailureCode.INTERNAL, f"no {number}"))
    with pytest.raises(GenerationFailed, match=f"no {MAX_LOST_ATTEMPTS - 1}"):
        await asking
    assert scene.whole()


async def test_what_a_draining_worker_leaves_is_no_lost_attempt() -> None:
    scene = Scene(max_tokens=9)
    asking = await scene.ask()
    for number in range(MAX_LOST_ATTEMPTS + 1):
        await eventually(lambda n=number: len(scene.decode.orders) == n + 1)
        scene.decode.draining = True
        scene.dispatcher.lost(scene.decode, "it has drained")  # type: ignore[arg-type]
        scene.decode.draining = False  # a new one in its place
    await eventually(lambda: len(scene.decode.orders) == MAX_LOST_ATTEMPTS + 2)
    scene.tell(scene.prefill, delta(MAX_LOST_ATTEMPTS + 1, 0, 5, finish=FinishReason.STOP))
    assert (await asking).tokens == (5,)
    assert scene.whole()


async def test_prefill_counts_no_more_once_decode_has_gone_on() -> None:
    scene = Scene()
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    scene.tell(scene.decode, delta(0, 1, 6))
    await asking
    scene.dispatcher.lost(scene.prefill, "it died")  # type: ignore[arg-type]
    scene.tell(scene.prefill, broken(), Failure(attempt(), FailureCode.INTERNAL, "why"))
    assert (await anext(scene.stream)).tokens == (6,)
    asking = await scene.ask()
    scene.tell(scene.decode, delta(0, 2, 7, finish=FinishReason.LENGTH))
    assert (await asking).tokens == (7,)
    assert scene.whole()
