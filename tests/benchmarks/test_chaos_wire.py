"""benchmarks.chaos_wire: each harm is done to the message it names, once, and is overcome."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import chaos_wire
from benchmarks.chaos_wire import ANSWERS_AT, MESSAGES, SESSION, Harm, Order, interpose
from kvtransfer import IntegrityError, KVTransferError
from kvtransfer.messages import ChunkHeader
from kvtransfer.protocol import State
from tests.kvtransfer.harness import linked
from tests.protos.sessions import eventually, order, router, serving


class Orders:
    """Those of a worker process, given by the test."""

    def __init__(self, folder: Path) -> None:
        self.answers = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.answers.bind(str(folder / ANSWERS_AT))
        self.answers.settimeout(5)
        self.inner = chaos_wire._Orders(str(folder))
        self.number = 0

    def give(self, what: str, harm: Harm, seconds: float = 0.0) -> None:
        self.number += 1
        self.inner._order = Order(self.number, harm, what, seconds)

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
        monkeypatch.setattr(chaos_wire, "_patch", monkeypatch.setattr)
        monkeypatch.setattr("kvtransfer.fetch.CONFIRM_S", 0.05)
        monkeypatch.setattr("kvtransfer.session.GOODBYE_S", 0.05)
        chaos_wire._harm_transfers(given.inner)
        chaos_wire._harm_sessions(given.inner)
        yield given
        given.close()


def test_an_order_comes_as_it_was_given() -> None:
    given = Order(7, Harm.DELAY, SESSION, 0.5)
    assert Order.decode(given.encode()) == given


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("harm", Harm)
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
        await asyncio.to_thread(chaos_wire._cut_sessions)
        await mine.opened(2)
        assert len(mine.heard.losses) == 1
        mine.session.start(order("a"))
        await eventually(lambda: len(worker.started) == 1)


def test_workers_are_interposed_and_nobody_else(tmp_path: Path) -> None:
    interpose(tmp_path)
    code = (tmp_path / "sitecustomize.py").read_text()
    assert str(tmp_path) in code
    compile(code, "sitecustomize.py", "exec")
    exec(code)  # here nothing is imported: pytest is no worker
    assert not (tmp_path / str(os.getpid())).exists()
