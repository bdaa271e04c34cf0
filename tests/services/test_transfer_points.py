"""Workers that die, leases that end and clients that leave at named points of a transfer."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kvtransfer.protocol import State
from router.errors import GenerationFailed, Unavailable
from tests.services.client import ERROR_WITHIN_S, Client
from tests.services.deployment import (
    EACH_TRANSPORT,
    Deployment,
    deployment,
    eventually,
    expected,
    prompt_of,
)
from tests.services.points import POINTS, Point, slow_down_readers

LONG = prompt_of(40)  # five chunks
RECOVERS_WITHIN_S = 2.0
ABORTED_WITHIN_S = 1.0

by_each_transport = pytest.mark.parametrize("transports", EACH_TRANSPORT, ids=lambda t: t[0])
at_each_point = pytest.mark.parametrize("point", POINTS)


def blocks_in_health(served: Deployment) -> list[tuple[int, int]]:
    """(free, total) blocks of each worker that /health shows as ready."""
    workers = served.dispatcher.health()["workers"]
    blocks = [worker["blocks"] for worker in workers if worker["state"] == "ready"]
    return [(each["free"], each["total"]) for each in blocks]


def all_free(served: Deployment) -> bool:
    return all(free == total for free, total in blocks_in_health(served))


def test_every_state_that_a_transfer_can_be_lost_in_has_a_point() -> None:
    assert set(POINTS.values()) == {state for state in State if not state.over}


@by_each_transport
@at_each_point
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_dies_and_the_other_recovers(
    transports: tuple[str], point: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no third: the client may be told so, but what is left must be whole."""
    async with deployment("1,1", transports=transports) as served:
        standing = Point(served, point, monkeypatch)
        client = Client(served, LONG, max_tokens=8)
        await standing.reached()
        victim, other = f"{role}-0", "decode-0" if role == "prefill" else "prefill-0"
        if (point, role) == ("before done", "decode"):
            # By then it may be decoding, and must not have ended.
            await eventually(lambda: bool(client.tokens))
        dying = asyncio.create_task(standing.kill(served[victim]))
        with suppress(Unavailable, GenerationFailed):
            await asyncio.wait_for(client.task, ERROR_WITHIN_S)
        assert client.tokens == expected(LONG, len(client.tokens))
        await eventually(lambda: served[other].idle, RECOVERS_WITHIN_S)
        await dying
        await served.revive(victim)
        assert await served.ask(LONG) == expected(LONG, 8)
        await served.until_idle()


@by_each_transport
@at_each_point
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_dies_and_another_of_its_role_goes_on(
    transports: tuple[str], point: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment("2,2", transports=transports) as served:
        standing = Point(served, point, monkeypatch)
        client = Client(served, LONG, max_tokens=8)
        await standing.reached()
        (flight,) = served.dispatcher._flights.values()
        address = flight.workers[0 if role == "prefill" else 1].address
        (victim,) = [m for n, m in served.members.items() if address.endswith(f"/{n}.sock")]
        await standing.kill(victim)
        await client.ends_right(8)
        await served.until_idle()


@by_each_transport
@pytest.mark.parametrize("phase", ["queued", "prefilling", "transferring", "decoding"])
async def test_an_abort_gives_every_block_back_at_both_ends(
    transports: tuple[str], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /health tells it. The step, or the read, that was running then is let go to its end."""
    limits = {"max_seqs": 1, "max_prefill_seqs": 1, "max_batch_tokens": 16}
    async with deployment("1,1", transports=transports, **limits) as served:
        busy = served["decode-0" if phase == "decoding" else "prefill-0"]
        standing = Point(served, "amid the chunks", monkeypatch)
        if phase != "transferring":
            standing.let_go()
            busy.runner.shut(passes=1)
        clients = [Client(served, LONG) for _ in range(2 if phase == "queued" else 1)]
        if phase == "transferring":
            await standing.reached()
        else:
            await eventually(lambda: busy.runner.held)
        await eventually(lambda: busy.host._sessions.attempts == len(clients))
        await eventually(lambda: not all_free(served))
        clients[-1].task.cancel()
        await asyncio.gather(clients[-1].task, return_exceptions=True)
        busy.runner.open()
        standing.let_go()
        if phase == "queued":
            await clients[0].ends_right(24)  # up to the model's context
        await eventually(lambda: all_free(served), ABORTED_WITHIN_S)
        await served.until_idle()


@by_each_transport
async def test_a_lease_that_ends_amid_the_chunks_never_gives_wrong_text(
    transports: tuple[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment("1,1", transports=transports) as served:
        source, go = served["prefill-0"].source, asyncio.Event()
        source._lease_s, source.window = 0.05, 2
        took = slow_down_readers(monkeypatch, go)
        client = Client(served, LONG, max_tokens=8)
        async with asyncio.timeout(5):
            await took.wait()
        await eventually(lambda: served["prefill-0"].engine.load().exported_blocks == 0)
        source._lease_s = 30.0
        go.set()
        await client.ends_right(8)
        await served.until_idle()
        counts = served["prefill-0"].host.transfers().values()
        assert sum(each.failures.get("lease_expired", 0) for each in counts) == 1
