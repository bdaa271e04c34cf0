"""Workers that die, engines that fail, leases that end: exact tokens, or an error at once."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from deploy.roster import PlannedWorker
from deploy.signals import Stop
from deploy.worker import CLOSE_S, run_workers
from engine.events import Add
from engine.plan import ExportKV, ImportKV, StepOutcome, StepPlan
from engine.types import COLOCATED, AttemptId, SamplingParams, SequenceId, SequenceRequest
from kvtransfer.protocol import State
from protos.codec import StartOrder
from router.dispatch import MAX_LOST_ATTEMPTS
from router.errors import GenerationFailed, Unavailable
from settings.config import EngineConfig, ModelConfig, WorkerConfig
from tests.services.client import ERROR_WITHIN_S, PROMPT, Client
from tests.services.deployment import (
    EACH_TRANSPORT,
    Deployment,
    Member,
    build,
    deployment,
    eventually,
    prompt_of,
)


def holder(served: Deployment, role: str) -> Member:
    """The worker of a role that has the one request in flight."""
    (flight,) = served.dispatcher._flights.values()
    worker = flight.workers[0 if role == "prefill" else -1]
    (member,) = [
        m for name, m in served.members.items() if worker.address.endswith(f"/{name}.sock")
    ]
    return member


async def begin_prefill(served: Deployment) -> tuple[Client, Member]:
    """A request whose prefill is being computed and does not end."""
    members = [m for name, m in served.members.items() if not name.startswith("decode")]
    for member in members:
        member.runner.shut()
    client = Client(served)
    await eventually(lambda: any(m.runner.held for m in members))
    (victim,) = [m for m in members if m.runner.held]
    for member in members:
        if member is not victim:
            member.runner.open()
    return client, victim


async def begin_decode(served: Deployment, tokens: int = 4) -> tuple[Client, Member]:
    """A request of which `tokens` tokens have come, and no more do."""
    members = [m for name, m in served.members.items() if not name.startswith("prefill")]
    colocated = "worker-0" in served.members
    for member in members:
        member.runner.shut(tokens if colocated else tokens - 1)
    client = Client(served)
    await client.has(tokens)
    victim = holder(served, "decode")
    await eventually(lambda: victim.runner.held)
    assert len(client.tokens) == tokens
    for member in members:
        if member is not victim:
            member.runner.open()
    return client, victim


async def test_prefill_dies_while_computing_and_another_serves() -> None:
    async with deployment("2,1") as served:
        client, victim = await begin_prefill(served)
        await victim.kill()
        await client.ends_right()
        await served.until_idle()


async def test_prefill_dies_with_a_queue_and_another_serves_all_of_it() -> None:
    limits = {"max_seqs": 1, "max_prefill_seqs": 1}
    async with deployment("2,1", **limits) as served:
        for name in ("prefill-0", "prefill-1"):
            served[name].runner.shut()
        prompts = [prompt_of(9, salt=i) for i in range(8)]
        clients = [Client(served, prompt) for prompt in prompts]
        both = [served[f"prefill-{i}"] for i in range(2)]
        await eventually(lambda: sum(m.host._sessions.attempts for m in both) == 8)
        assert all(m.host._sessions.attempts for m in both)
        await both[0].kill()
        both[1].runner.open()
        for client in clients:
            await client.ends_right()
        await served.until_idle()


@pytest.mark.parametrize("transports", EACH_TRANSPORT)
async def test_prefill_dies_while_its_kv_waits_for_room_or_travels(transports: tuple[str]) -> None:
    async with deployment(
        "2,1", transports=transports, only={"decode-0": {"max_seqs": 1}}
    ) as served:
        decode = served["decode-0"]
        decode.runner.shut()
        running = Client(served)
        await eventually(lambda: decode.runner.held)
        waiting = Client(served, prompt_of(50))
        await waiting.has(1)

        def exporting() -> list[Member]:
            return [m for m in served.members.values() if m.engine.load().exported_blocks]

        await eventually(lambda: len(exporting()) == 1)  # the running one's are released
        await exporting()[0].kill()
        decode.runner.open()
        await waiting.ends_right(14)  # up to the model's context
        await running.ends_right()
        await served.until_idle()


@pytest.mark.parametrize("topology", ["1,1", "2,1"])
async def test_prefill_dies_once_decode_has_it_all_and_nobody_notices(topology: str) -> None:
    async with deployment(topology) as served:
        client, decode = await begin_decode(served)
        await holder(served, "prefill").kill()
        await eventually(lambda: not served.pool.all_open)
        attempts = [attempt.attempt for attempt in served.dispatcher._flights]
        decode.runner.open()
        await client.ends_right()
        assert attempts == [0], "the stream needed no other attempt"
        await eventually(lambda: decode.idle)


@pytest.mark.parametrize("tokens", [2, 4])
async def test_decode_dies_in_mid_stream_and_another_goes_on(tokens: int) -> None:
    async with deployment("1,2") as served:
        client, victim = await begin_decode(served, tokens)
        await victim.kill()
        await client.ends_right()
        await served.until_idle()


async def test_decode_dies_under_many_streams() -> None:
    async with deployment("1,2", step_s=0.001) as served:
        prompts = [prompt_of(5 + i, salt=i) for i in range(12)]
        clients = [Client(served, prompt) for prompt in prompts]
        for client in clients[:3]:
            await client.has(3)
        await served["decode-0"].kill()
        for client in clients:
            await client.ends_right()
        await served.until_idle()


async def test_the_last_prefill_worker_dies() -> None:
    async with deployment("1,1") as served:
        client, victim = await begin_prefill(served)
        await asyncio.gather(victim.kill(), client.is_told(Unavailable, GenerationFailed))
        await served.until_idle()


@pytest.mark.parametrize("topology", ["1,1", "colocated"])
async def test_the_last_decode_worker_dies(topology: str) -> None:
    async with deployment(topology) as served:
        client, victim = await begin_decode(served)
        await asyncio.gather(victim.kill(), client.is_told(Unavailable, GenerationFailed))
        assert len(client.tokens) == 4
        await served.until_idle()


@pytest.mark.parametrize("role", ["prefill-0", "decode-0", "worker-0"])
async def test_a_failing_engine_ends_its_worker(role: str) -> None:
    """`serve` raises, and the worker can still be closed: its process must not hang."""
    topology = "colocated" if role == "worker-0" else "2,1" if role == "prefill-0" else "1,2"
    async with deployment(topology) as served:
        for member in served.members.values():
            member.runner.shut()
        victim = served[role]
        clients = [Client(served) for _ in range(4)]
        for name, member in served.members.items():
            if name.startswith("prefill") and member is not victim:
                member.runner.open()
        await eventually(lambda: victim.runner.held)
        victim.runner.fault = RuntimeError("no such device")
        serving = asyncio.create_task(victim.host.serve(asyncio.Event()))
        victim.runner.open()
        with pytest.raises(RuntimeError, match="engine has failed"):
            await asyncio.wait_for(serving, 2)
        await asyncio.wait_for(victim.kill(), 2)
        for member in served.members.values():
            member.runner.open()
        for client in clients:
            if topology == "colocated":
                await client.is_told(Unavailable, GenerationFailed)
            else:
                await client.ends_right()
        await served.until_idle()


async def test_a_step_that_goes_on_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = build(num_blocks=64, step_s=0.0)
    monkeypatch.setattr("deploy.worker._load", lambda *_: [built])
    stop = Stop()
    built.runner.shut()
    with tempfile.TemporaryDirectory(prefix="hs-") as folder:
        config = WorkerConfig(
            ModelConfig("fake"), EngineConfig(), f"unix:{folder}/w.sock", None, None, False,
            "INFO", Path(folder),
        )  # fmt: skip
        planned = PlannedWorker("worker-0", COLOCATED, config.address)
        running = asyncio.create_task(run_workers(config, [planned], stop))
        sequence = SequenceId(AttemptId("request", 0), 0)
        built.engine.submit(Add(SequenceRequest(sequence, COLOCATED, PROMPT, SamplingParams())))
        await eventually(lambda: built.runner.held)
        stop.ask()
        stop.ask()  # no grace for what runs
        await asyncio.wait_for(running, CLOSE_S + 1)
        assert os.listdir(folder) == []
    built.runner.open()


@pytest.mark.parametrize(("role", "copy"), [("prefill-0", ExportKV), ("decode-0", ImportKV)])
async def test_an_engine_that_fails_in_mid_transfer_lets_its_worker_close(
    role: str, copy: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment("1,1") as served:
        victim = served[role]
        run = victim.runner.run

        def fail(plan: StepPlan) -> StepOutcome:
            if any(isinstance(entry, copy) for entry in plan.entries):
                raise RuntimeError("a copy failed")
            return run(plan)

        monkeypatch.setattr(victim.runner, "run", fail)
        client = Client(served, prompt_of(50))
        await eventually(victim.host._died.done)
        await asyncio.wait_for(victim.kill(), 2)
        with pytest.raises((Unavailable, GenerationFailed)):
            await asyncio.wait_for(client.task, ERROR_WITHIN_S)


async def test_a_decode_pool_of_few_blocks_serves_one_after_the_other() -> None:
    prompts = [prompt_of(20, salt=i) for i in range(6)]
    async with deployment("2,1", num_blocks=9) as served:  # one sequence needs 8
        clients = [Client(served, prompt, max_tokens=12) for prompt in prompts]
        for client in clients:
            await client.ends_right(12)
        await served.until_idle()


@pytest.mark.parametrize("seed", range(4))
async def test_tiny_pools_in_opposite_orders_make_progress(seed: int) -> None:
    """P0 queues a, b and P1 queues b, a, for decode workers that hold one at a time."""
    prompts = [prompt_of(20, salt=i) for i in range(16)]
    async with deployment("2,2", num_blocks=9, seed=seed) as served:
        clients = [Client(served, prompt, max_tokens=12) for prompt in prompts]
        for client in clients:
            await client.ends_right(12)
        await served.until_idle()


async def test_a_lease_that_ends_unclaimed_is_a_lost_attempt() -> None:
    """The decode worker never comes for the first attempt's KV; the second one is served."""
    async with deployment("1,1") as served:
        source, decode = served["prefill-0"].source, served["decode-0"].host._decode
        start, started = decode.start, []
        source._lease_s = 0.02

        def ignore_the_first(order: StartOrder) -> None:
            started.append(order.attempt.attempt)
            if len(started) > 1:
                source._lease_s = 30.0
                start(order)

        decode.start = ignore_the_first
        client = Client(served)
        await client.ends_right()
        assert started == [0, 1]
        await served.until_idle()


@pytest.mark.parametrize("transports", EACH_TRANSPORT)
async def test_a_lease_that_ends_before_the_pull_never_gives_wrong_text(
    transports: tuple[str],
) -> None:
    async with deployment(
        "1,1", transports=transports, only={"decode-0": {"max_seqs": 1}}
    ) as served:
        source, decode = served["prefill-0"].source, served["decode-0"]
        source._lease_s = 0.05
        decode.runner.shut()
        running = Client(served)
        await eventually(lambda: decode.runner.held)
        waiting = Client(served, prompt_of(30))
        await waiting.has(1)
        # It has no room and its next renewal is far away.
        await eventually(lambda: any(s.state is State.ADMITTED for s in source._sessions))
        await eventually(lambda: served["prefill-0"].engine.load().exported_blocks == 0)
        source._lease_s = 30.0
        decode.runner.open()
        await running.ends_right()
        await waiting.ends_right()
        await served.until_idle()


async def test_losing_every_attempt_is_an_error_and_not_an_endless_loop() -> None:
    async with deployment("1,1") as served:
        tried = []

        async def broken(transfer_id: bytes, *_: object) -> None:
            tried.append(transfer_id)
            raise RuntimeError("no such memory")

        served["prefill-0"].source.read = broken
        client = Client(served)
        await client.is_told(GenerationFailed)
        assert len(set(tried)) == MAX_LOST_ATTEMPTS
        await served.until_idle()
