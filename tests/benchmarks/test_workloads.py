"""The four workloads' requests, figures and notes."""

import random

import httpx
import pytest

from benchmarks.openai_stream import OpenAIStreamClient
from benchmarks.workloads import (
    FULL,
    QUICK,
    WORKLOADS,
    BatchShape,
    MixedShape,
    Shapes,
    WorkloadResult,
    random_prompt,
    run_workload,
)
from tests.benchmarks.fake_server import FakeServer


async def run(fake: FakeServer, shape: BatchShape | MixedShape) -> tuple[WorkloadResult, int]:
    """One run, and how often it ticked."""
    ticks = []
    async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
        client = OpenAIStreamClient(http, fake.url, model="m")
        result = await run_workload(client, shape, random.Random(1), lambda: ticks.append(1))
    return result, len(ticks)


def test_prompts_have_the_length_asked_and_differ() -> None:
    rng = random.Random(3)
    first, second = random_prompt(rng, 128), random_prompt(rng, 128)
    assert len(first.split()) == len(second.split()) == 128
    assert first.startswith(" ")
    assert first != second
    assert random_prompt(random.Random(3), 128) == first


def test_both_sizes_have_every_workload() -> None:
    assert tuple(FULL) == tuple(QUICK) == WORKLOADS


async def test_one_at_a_time(fake: FakeServer, small_shapes: Shapes) -> None:
    fake.ttft, fake.tpot = 0.04, 0.01
    result, ticks = await run(fake, small_shapes["w1"])
    figures = result.figures
    assert ticks == len(result.requests) == 2
    assert (result.errors, result.notes, result.failed) == ([], [], False)
    assert figures["ttft_p50_ms"] is not None
    assert figures["ttft_p50_ms"] >= 40
    assert figures["prefill_tok_s"] is not None
    assert figures["prefill_tok_s"] <= 8 / 0.04
    assert figures["output_tok_s"] is not None
    assert figures["output_tok_s"] <= 4 / 0.07
    assert fake.bodies[0]["prompt"] != fake.bodies[1]["prompt"]


async def test_all_at_once_overlap(fake: FakeServer, small_shapes: Shapes) -> None:
    fake.ttft, fake.tpot = 0.2, 0.01
    result, ticks = await run(fake, small_shapes["w2"])
    assert ticks == 4
    assert result.figures["output_tok_s"] is not None
    assert 4 * 4 / 0.8 < result.figures["output_tok_s"] <= 4 * 4 / 0.23
    assert result.figures["prefill_tok_s"] is not None
    assert 4 * 8 / 0.8 < result.figures["prefill_tok_s"] <= 4 * 8 / 0.2


async def test_streams_beside_long_prompts(fake: FakeServer, small_shapes: Shapes) -> None:
    fake.ttft, fake.tpot = 0.01, 0.005
    result, ticks = await run(fake, small_shapes["w4"])
    assert ticks == 2
    assert result.errors == []
    lengths = [len(body["prompt"].split()) for body in fake.bodies]
    assert lengths.count(30) == 2
    assert lengths.count(64) >= 2
    assert sum(timing.stopped for timing in result.requests) <= 2
    figures = result.figures
    assert figures["tpot_p50_ms"] is None
    for name in ("ttft_p50_ms", "itl_p50_ms", "itl_quiet_p50_ms", "output_tok_s"):
        assert figures[name] is not None, name
    assert figures["itl_max_ms"] is not None
    assert figures["itl_p99_ms"] is not None
    assert figures["itl_max_ms"] >= figures["itl_p99_ms"] >= 5


async def test_streamed_tokens_are_scaled_by_usage(fake: FakeServer, small_shapes: Shapes) -> None:
    shape = small_shapes["w4"]
    fake.tpot = 0.02
    narrow, _ = await run(fake, shape)
    fake.tokens_per_event = 2
    wide, _ = await run(fake, shape)
    assert narrow.figures["output_tok_s"] is not None
    assert wide.figures["output_tok_s"] is not None
    assert wide.figures["output_tok_s"] > 1.4 * narrow.figures["output_tok_s"]


async def test_failed_requests_are_reported_beside_the_others(
    fake: FakeServer, small_shapes: Shapes
) -> None:
    fake.fault, fake.healthy_requests = "http", 1
    result, _ = await run(fake, small_shapes["w1"])
    assert len(result.errors) == 1
    assert result.errors[0].startswith("HTTP 503")
    assert not result.failed


@pytest.mark.parametrize("workload", WORKLOADS)
async def test_a_workload_without_a_success_has_failed(
    fake: FakeServer, small_shapes: Shapes, workload: str
) -> None:
    fake.fault = "http"
    result, _ = await run(fake, small_shapes[workload])
    assert result.failed
    assert result.errors
    assert set(result.figures.values()) == {None}


async def test_streams_that_stall_are_errors(fake: FakeServer) -> None:
    fake.tpot = 60
    shape = MixedShape(
        streams=1, long_prompts=1, long_prompt_tokens=30, settle=0.05, period=0.05, drain=0.1
    )
    result, _ = await run(fake, shape)
    assert result.errors == [
        "long prompt unfinished 0.1 s after the end",
        "stream without an event for 0.1 s",
    ]


async def test_notes_say_what_distorts(fake: FakeServer, small_shapes: Shapes) -> None:
    fake.usage = False
    assert (await run(fake, small_shapes["w1"]))[0].notes == [
        "2 requests without usage: tokens counted from events"
    ]
    fake.usage, fake.tokens_per_event = True, 2
    assert (await run(fake, small_shapes["w1"]))[0].notes == [
        "2.0 tokens per event: ITL is between events, not tokens"
    ]
