"""Named points of a KV transfer at which a test can hold it, and what may happen there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from engine.events import Command
from kvtransfer import Chunk, Fetch
from kvtransfer.protocol import State
from tests.services.deployment import Deployment, Member, eventually

POINTS = {
    "before the claim": State.CONNECTED,
    "before the admission": State.CLAIMED,
    "after the admission": State.ADMITTED,
    "amid the chunks": State.STREAMING,
    "before done": State.ENDED,
}
"""Point → the state in which the transfer stands there."""


class Point:
    """Holds the first transfer that comes to a point until `let_go`; others pass."""

    def __init__(self, served: Deployment, name: str, patch: pytest.MonkeyPatch) -> None:
        self._reached = asyncio.Event()
        self._go = asyncio.Event()
        hold = {
            "before the claim": self._hold_connections,
            "before the admission": self._hold_prefills,
            "after the admission": self._hold_reservations,
            "amid the chunks": self._hold_reads,
            "before done": self._hold_done,
        }[name]
        hold(list(served.members.values()), patch)

    async def reached(self) -> None:
        async with asyncio.timeout(5):
            await self._reached.wait()

    def let_go(self) -> None:
        self._go.set()

    async def kill(self, victim: Member) -> None:
        """The worker dies while its transfer stands here."""
        victim.closed = True
        self.let_go()
        await victim.kill()

    async def _stop_here(self) -> None:
        if not self._reached.is_set():
            self._reached.set()
            await self._go.wait()

    def _hold_prefills(self, members: Sequence[Member], patch: pytest.MonkeyPatch) -> None:
        """Prefill engines hear of nothing before; then of all, in its order."""
        kept: list[Callable[[], None]] | None = []

        def keeping(submit: Callable[[Command], None]) -> Callable[[Command], None]:
            def take(command: Command) -> None:
                if kept is None:
                    submit(command)
                else:
                    kept.append(partial(submit, command))

            return take

        for member in members:
            service = member.host._prefill
            patch.setattr(service, "_submit", keeping(service._submit))

        def stands(member: Member) -> bool:
            return any(s.state is State.CLAIMED for s in member.source._sessions)

        async def hold() -> None:
            nonlocal kept
            await eventually(lambda: any(stands(member) for member in members))
            self._reached.set()
            await self._go.wait()
            told, kept = kept, None
            for tell in told or ():
                tell()

        self._holding = asyncio.create_task(hold())

    def _hold_connections(self, members: Sequence[Member], patch: pytest.MonkeyPatch) -> None:
        for member in members:
            sink = member.host._decode._sink
            patch.setattr(sink, "_open", self._then(sink._open))

    def _hold_reservations(self, members: Sequence[Member], patch: pytest.MonkeyPatch) -> None:
        for member in members:
            service = member.host._decode
            patch.setattr(service, "_reserve", self._then(service._reserve))

    def _then(self, go_on: Any) -> Any:
        async def held(*arguments: Any) -> Any:
            await self._stop_here()
            return await go_on(*arguments)

        return held

    def _hold_reads(self, members: Sequence[Member], patch: pytest.MonkeyPatch) -> None:
        for member in members:
            patch.setattr(member.source, "read", self._second_read(member, member.source.read))

    def _second_read(self, member: Member, read: Any) -> Any:
        async def held(transfer_id: bytes, start: int, *rest: Any) -> Any:
            if start and not self._go.is_set():
                self._reached.set()
                await self._go.wait()
                if member.closed:
                    raise RuntimeError("the worker is dead")
            return await read(transfer_id, start, *rest)

        return held

    def _hold_done(self, _: Sequence[Member], patch: pytest.MonkeyPatch) -> None:
        close = Fetch.close

        async def held(fetch: Fetch, *, done: bool) -> None:
            try:
                if done:
                    await self._stop_here()
            except asyncio.CancelledError:
                await close(fetch, done=False)
                raise
            await close(fetch, done=done)

        patch.setattr(Fetch, "close", held)


def slow_down_readers(patch: pytest.MonkeyPatch, go: asyncio.Event) -> asyncio.Event:
    """Readers take one chunk and no more until `go`; returns what is set when one has."""
    took = asyncio.Event()
    chunks = Fetch.chunks

    async def slow(fetch: Fetch, from_token: int | None = None) -> AsyncIterator[Chunk]:
        async for chunk in chunks(fetch, from_token):
            yield chunk
            took.set()
            await go.wait()

    patch.setattr(Fetch, "chunks", slow)
    return took
