"""Workers with few KV blocks: streams go on unbroken, whoever makes room for whom."""

from __future__ import annotations

import asyncio

import pytest

from engine.types import Failure, FailureCode, FinishReason
from router import dispatch
from router.metrics import RouterMetrics
from tests.services.deployment import TOPOLOGIES, deployment, eventually, expected, prompt_of
from tests.services.scene import Scene, attempt, delta

COUNT = 40


def preempted(number: int) -> Failure:
    return Failure(attempt(number), FailureCode.PREEMPTED, "older sequences needed its blocks")


async def test_a_preempted_stream_goes_on_and_no_failure_is_counted() -> None:
    """However often: each time others have come further."""
    times = dispatch.MAX_LOST_ATTEMPTS + 2
    scene = Scene(max_tokens=times + 2)
    asking = await scene.ask()
    for number in range(times):
        await eventually(lambda: len(scene.decode.orders) == number + 1)  # noqa: B023
        scene.tell(scene.prefill, delta(number, number, 5))
        assert (await asking).tokens == (5,)
        asking = await scene.ask()
        scene.tell(scene.decode, preempted(number))
    await eventually(lambda: len(scene.decode.orders) == times + 1)
    (sequence,) = scene.prefill.orders[-1].sequences
    assert sequence.output == (5,) * times
    scene.tell(scene.prefill, delta(times, times, 6, finish=FinishReason.STOP))
    assert (await asking).tokens == (6,)
    assert scene.whole()


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_streams_share_too_few_blocks(topology: str) -> None:
    """Each needs 13 of the 16 blocks for its last token, and begins with 4."""
    prompts = [prompt_of(9, n) for n in range(6)]
    async with deployment(topology, num_blocks=16, step_s=0.0005) as served:
        metrics = RouterMetrics("m")
        metrics.export_workers(served.pool)
        answers = await asyncio.wait_for(
            asyncio.gather(*(served.ask(prompt, max_tokens=COUNT) for prompt in prompts)), 20
        )
        assert answers == [expected(prompt, COUNT) for prompt in prompts]
        count = served.pool.preemptions
        assert count > 0
        series = f'vllm:num_preemptions_total{{engine="0",model_name="m"}} {float(count)}'
        assert series in metrics.render().decode()
        await served.until_idle()
