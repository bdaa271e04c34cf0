"""benchmarks.chaos_agent: each harm is done to what it names, once, and is overcome."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import chaos_agent
from benchmarks.chaos_orders import (
    ANSWERS_AT,
    MESSAGES,
    PROCESS,
    SESSION,
    WORKERS,
    Harm,
    Order,
    interpose,
)
from deploy.processes import plan_processes
from engine.sequence import SequenceState
from kvtransfer import IntegrityError, KVTransferError
from kvtransfer.messages import ChunkHeader
from kvtransfer.protocol import State
from settings.config import Topology
from tests.kvtransfer.harness import linked
from tests.protos.sessions import eventually, order, router, serving
from tests.services.deployment import deployment, expected, prompt_of


class Orders:
    """Those of a worker process, given by the test."""

    def __init__(self, folder: Path) -> None:
        self.answers = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.answers.bind(str(folder / ANSWERS_AT))
        self.answers.settimeout(5)
        self.inner = chaos_agent._Orders(str(folder))
        self.number = 0

    def give(self, what: str, harm: Harm, seconds: float = 0.0, at: str = "") -> None:
        self.number += 1
        self.inner.give(Order(self.number, harm, what, seconds, at))

    def done(self) -> bool:
        """Whether the last one was done; told by now, if so."""
        if self.inner._order is not None:
            return False
        return int(self.answers.recv(64)) == self.number

    def close(self) -> None:
        self.answers.close()
        self.inner._socket.close()


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        given = Orders(Path(folder))
        monkeypatch.setattr(chaos_agent, "_patch", monkeypatch.setattr)
        monkeypatch.setattr("kvtransfer.fetch.CONFIRM_S", 0.05)
        monkeypatch.setattr("kvtransfer.session.GOODBYE_S", 0.05)
        chaos_agent._watch_sequences(given.inner)
        chaos_agent._harm_transfers(given.inner)
        chaos_agent._harm_sessions(given.inner)
        yield given
        given.close()


def test_an_order_comes_as_it_was_given() -> None:
    given = Order(7, Harm.DELAY, SESSION, 0.5, "decoding")
    assert Order.decode(given.encode()) == given


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("harm", [Harm.RESET, Harm.DELAY, Harm.CORRUPT])
@pytest.mark.parametrize("state", MESSAGES)
async def test_a_transfer_is_harmed_in_its_state(
    orders: Orders, state: State, harm: Harm, transport: str
) -> None:
    async with linked(transport) as link:
        link.publish(b"before", 20)
        await link.receive(link.fetch(b"before"), b"before")
        orders.give(MESSAGES[state].__name__, harm, seconds=0.01)
        link.publish(b"harmed", 20)
        fetch = link.fetch(b"harmed")
        (result,) = await asyncio.gather(link.receive(fetch, b"harmed"), return_exceptions=True)
        await fetch.close(done=False)
        if isinstance(result, int):
            # The reader of a claim that broke tries again; one that is done has everything.
            assert harm is Harm.DELAY or state in (State.CONNECTED, State.CLAIMED, State.ENDED)
        else:
            assert isinstance(result, KVTransferError)
            assert harm is not Harm.DELAY
            corrupted = (MESSAGES[state], harm) == (ChunkHeader, Harm.CORRUPT)
            assert isinstance(result, IntegrityError) == corrupted
        assert orders.done()
        link.publish(b"after", 20)
        await link.receive(link.fetch(b"after"), b"after")


@pytest.mark.parametrize("harm", [Harm.DELAY, Harm.CORRUPT])
async def test_a_session_is_harmed_and_opens_again(orders: Orders, harm: Harm) -> None:
    async with serving() as (address, worker, _), router(address) as mine:
        orders.give(SESSION, harm, seconds=0.01)
        await eventually(orders.done)
        if harm is Harm.CORRUPT:
            await mine.opened(2)
            assert len(mine.heard.losses) == 1
        mine.session.start(order("a"))
        await eventually(lambda: len(worker.started) == 1)
        assert harm is Harm.CORRUPT or not mine.heard.losses


async def test_a_session_is_cut_under_the_hands_of_grpc(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as (address, worker, _), router(address) as mine:
        monkeypatch.setattr(sys, "argv", ["worker", f"--address={address}"])
        orders.give(SESSION, Harm.RESET)
        assert orders.done()
        await mine.opened(2)
        assert len(mine.heard.losses) == 1
        mine.session.start(order("a"))
        await eventually(lambda: len(worker.started) == 1)


@pytest.mark.parametrize("state", [s for s in SequenceState if s is not SequenceState.ENDED])
async def test_a_process_is_harmed_as_a_sequence_enters_a_state(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, state: SequenceState
) -> None:
    sent: list[tuple[int, signal.Signals]] = []
    monkeypatch.setattr(chaos_agent.os, "kill", lambda pid, number: sent.append((pid, number)))
    async with deployment("1,1") as served:
        orders.give(PROCESS, Harm.END, at=state.value)
        assert not sent
        assert await served.ask(prompt_of(9)) == expected(prompt_of(9), 8)
        assert sent == [(os.getpid(), signal.SIGTERM)]
        assert orders.done()


async def test_a_session_is_harmed_by_the_message_after_a_state(orders: Orders) -> None:
    async with deployment("1,1") as served:
        orders.give(SESSION, Harm.DELAY, seconds=0.01, at="decoding")
        await asyncio.sleep(0)
        assert not orders.done()
        assert await served.ask(prompt_of(9)) == expected(prompt_of(9), 8)
        await eventually(orders.done)


def test_workers_are_interposed_and_nobody_else(tmp_path: Path) -> None:
    interpose(tmp_path)
    code = (tmp_path / "sitecustomize.py").read_text()
    assert str(tmp_path) in code
    exec(compile(code, "sitecustomize.py", "exec"))  # nothing is done: pytest is no worker
    assert not (tmp_path / str(os.getpid())).exists()
    modules = [worker.module for worker in plan_processes(Topology(1, 1), tmp_path)]
    assert {*modules, plan_processes(None, tmp_path)[0].module} == set(WORKERS)
