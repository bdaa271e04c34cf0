"""Whatever workers tell a router, repeated, late, of nobody or out of order: it lives on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.types import (
    Failure,
    FailureCode,
    FinishReason,
    SamplingParams,
    SequenceId,
    TokenDelta,
)
from protos.codec import RejectedAttempt
from router import dispatch, worker_search
from router.errors import ServingError
from tests.services.scene import Scene, attempt

TOKENS = 6
TRUTH = [10 + index for index in range(TOKENS)]

attempts = st.builds(attempt, st.integers(0, 3))


@st.composite
def deltas(draw: st.DrawFn) -> TokenDelta:
    """True tokens, anywhere, of an attempt that is there, was there or never will be."""
    first = draw(st.integers(0, TOKENS - 1))
    stop = draw(st.integers(first + 1, TOKENS))
    finish = FinishReason.LENGTH if stop == TOKENS else None
    return TokenDelta(SequenceId(draw(attempts), 0), first, tuple(TRUTH[first:stop]), None, finish)


NEWS = (
    deltas()
    | st.builds(Failure, attempts, st.sampled_from(FailureCode), st.just("why"))
    | st.builds(RejectedAttempt, attempts, st.just("full"))
    | st.just("lost")
)


async def play(script: list[tuple[bool, object]]) -> None:
    scene = Scene(max_tokens=TOKENS, worker_wait_s=0.01)
    tokens: list[int] = []

    async def read() -> None:
        async for delta in scene.stream:
            assert delta.index == len(tokens)
            tokens.extend(delta.tokens)

    reading = asyncio.create_task(read())
    for at_prefill, news in script:
        for _ in range(3):
            await asyncio.sleep(0)
        worker = scene.prefill if at_prefill else scene.decode
        if news == "lost":
            scene.dispatcher.lost(worker, "it died")  # type: ignore[arg-type]
        else:
            scene.tell(worker, news)  # type: ignore[arg-type]
    reading.cancel()
    with suppress(asyncio.CancelledError, ServingError):
        await reading
    assert tokens == TRUTH[: len(tokens)]
    assert scene.whole()
    fresh = scene.dispatcher.generate((1,), SamplingParams(max_tokens=1), request_id="fresh")
    asking = asyncio.ensure_future(anext(fresh))
    await asyncio.sleep(0)
    assert scene.prefill.orders[-1].attempt.request_id == "fresh"
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert scene.whole()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), NEWS), max_size=20))
def test_a_stream_is_a_beginning_of_the_truth_and_nothing_stays(
    script: list[tuple[bool, object]],
) -> None:
    with (
        patch.object(dispatch, "TRANSFER_GRACE_S", 0.0),
        patch.object(worker_search, "FULL_RETRY_S", 0.0),
    ):
        asyncio.run(play(script))
