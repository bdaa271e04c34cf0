"""KV transfers of a whole deployment: their counters, their bounds, and how they go wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from collections.abc import Callable

import pytest

from engine.types import Role
from kvtransfer import ArraySpec, KVLayout, TransferCounts
from router.errors import GenerationFailed
from router.metrics import RouterMetrics
from tests.services.client import PROMPT, Client
from tests.services.deployment import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    EACH_TRANSPORT,
    Deployment,
    deployment,
    eventually,
    expected,
    prompt_of,
)

by_each_transport = pytest.mark.parametrize("transports", EACH_TRANSPORT, ids=lambda t: t[0])


def sums(served: Deployment, transport: str) -> tuple[TransferCounts, TransferCounts]:
    """What the router has heard from prefill and from decode workers."""
    known = served.pool.transfers.sums()
    return (
        known.get((transport, "prefill"), TransferCounts()),
        known.get((transport, "decode"), TransferCounts()),
    )


@by_each_transport
async def test_the_router_sums_what_both_ends_count_and_a_restart_takes_nothing_back(
    transports: tuple[str],
) -> None:
    async with deployment("1,1", transports=transports) as served:
        metrics = RouterMetrics("m")
        metrics.export_transfers(served.pool.transfers)

        def shown() -> float:
            name = "hexserve:kv_transfer_completed_total{"
            lines = metrics.render().decode().splitlines()
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

        for number in range(1, 4):
            assert await served.ask(PROMPT) == expected(PROMPT, 8)
            await eventually(
                lambda number=number: all(
                    end.transfers == number for end in sums(served, transports[0])
                )
            )
            assert shown() == 2 * number
            for end in sums(served, transports[0]):
                assert end.bytes == 4 * number * len(PROMPT)
                assert end.chunks == number * -(-len(PROMPT) // CHUNK_TOKENS)
                assert (end.failures, end.waiting, end.reads) == ({}, 0, 0)
            victim = "prefill-0" if number == 1 else "decode-0"
            await served[victim].kill()
            await eventually(lambda: not served.pool.all_open)
            assert shown() == 2 * number
            await served.revive(victim)
        await served.until_idle()


async def test_prefills_wait_while_decode_does_not_fetch() -> None:
    two_prompts = 2 * -(-len(PROMPT) // BLOCK_SIZE)
    only = {
        "prefill-0": {"max_exported_fraction": (two_prompts + 0.5) / 64},
        "decode-0": {"max_seqs": 1},
    }
    async with deployment("1,1", num_blocks=64, only=only) as served:
        prefill, decode = served["prefill-0"], served["decode-0"]
        decode.runner.shut()
        clients = [Client(served) for _ in range(6)]

        def health() -> dict:
            (described,) = [
                w for w in served.dispatcher.health()["workers"] if w.get("roles") == ["prefill"]
            ]
            return described

        await eventually(lambda: health()["export_limited"] and health()["waiting"] == 3)
        # One has been fetched and decodes; of the others no more than two are computed.
        assert prefill.engine.load().exported_blocks == two_prompts
        await eventually(lambda: sums(served, "shm")[0].waiting == 2)
        decode.runner.open()
        for client in clients:
            await client.ends_right()
        await served.until_idle()
        await eventually(lambda: not health()["export_limited"])


@pytest.mark.parametrize("fraction", [0.01, 0.5])
@pytest.mark.parametrize("seed", range(2))
async def test_tiny_pools_with_a_limit_in_opposite_orders_make_progress(
    seed: int, fraction: float
) -> None:
    prompts = [prompt_of(20, salt=i) for i in range(12)]
    few = {"num_blocks": 9, "seed": seed}
    async with deployment("2,2", max_exported_fraction=fraction, **few) as served:
        clients = [Client(served, prompt, max_tokens=12) for prompt in prompts]
        for client in clients:
            await client.ends_right(12)
        await served.until_idle()


def break_pulls(served: Deployment, patch: pytest.MonkeyPatch) -> None:
    """The prefill worker tells of a transfer server that nobody reaches."""
    arrays = served["prefill-0"].host._arrays
    assert arrays is not None
    park = arrays.park
    patch.setattr(
        arrays, "park", lambda chunk: dataclasses.replace(park(chunk), address="127.0.0.1:1")
    )


def fill_shared_memory(_: Deployment, patch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(os, "posix_fallocate", full)


@pytest.mark.parametrize(
    ("best", "fault"),
    [("jax", break_pulls), ("shm", fill_shared_memory)],
    ids=["jax cannot pull", "shm is full"],
)
async def test_a_transport_that_fails_costs_one_attempt_and_the_next_takes_another(
    best: str,
    fault: Callable[[Deployment, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with deployment("1,1", transports=(best, "grpc")) as served:
        fault(served, monkeypatch)
        for _ in range(3):
            assert await asyncio.wait_for(served.ask(PROMPT), 2) == expected(PROMPT, 8)
        counts = served["decode-0"].host.transfers()
        assert sum(counts[Role.DECODE, best].failures.values()) == 1
        assert counts[Role.DECODE, "grpc"].transfers == 3
        await served.until_idle()


def hold_other_kv(served: Deployment) -> None:
    layout = KVLayout("fake", (ArraySpec("tokens", "int64", 1, 1, 1),))
    served["decode-0"].host._decode._sink.layout = layout


def tell_sources(served: Deployment, *uris: str) -> None:
    """Have the router hear of other addresses of the prefill worker."""
    (worker,) = [w for w in served.pool._workers.values() if w.info.roles is Role.PREFILL]
    worker.info = dataclasses.replace(worker.info, sources=uris)


def serve_nowhere(served: Deployment) -> None:
    tell_sources(
        served, "shm:///nowhere/kv.sock", "grpc+unix:///nowhere/g.sock", "grpc://127.0.0.1:1"
    )


def serve_at_no_address(served: Deployment) -> None:
    tell_sources(served, "shm://relative", "ici://3")


def offer_nothing(served: Deployment) -> None:
    source = served["prefill-0"].source
    source.claim_wait_s = 0.05
    source.offer = lambda _: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "fault", [hold_other_kv, serve_nowhere, serve_at_no_address, offer_nothing]
)
async def test_what_can_never_be_fetched_is_an_error_soon_and_stops_no_worker(
    fault: Callable[[Deployment], None],
) -> None:
    async with deployment("1,1") as served:
        fault(served)
        await Client(served).is_told(GenerationFailed)
        await served.until_idle()
        assert await served.ask(PROMPT, max_tokens=1) == expected(PROMPT, 1)
        assert served.pool.all_open
        await served.until_idle()
