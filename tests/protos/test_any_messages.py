"""Whatever comes, in whatever order: a session ends or goes on, and its worker and router live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.types import AttemptId, Failure, FailureCode, SequenceId, TokenDelta
from protos import codec
from protos import worker_pb2 as wire
from protos.attempt_codec import MAX_ID_CHARACTERS
from protos.codec import WireError, encode_delta, encode_load, encode_welcome
from protos.session_client import SessionLost, WorkerSession
from protos.session_server import SessionServer
from tests.protos.sessions import INFO, Listener, ScriptedWorker, hello, order, start

NAMES = ("a", "b")
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def harmed(draw: st.DrawFn, good: bytes) -> bytes:
    """A message cut off, with one byte changed, or twice in one."""
    at = draw(st.integers(0, len(good) - 1))
    return draw(
        st.sampled_from(
            [good[:at], good[:at] + bytes([good[at] ^ draw(st.integers(1, 255))]) + good[at + 1 :],
             good + good]
        )
    )  # fmt: skip


def abort(name: str) -> bytes:
    return wire.Down(abort=wire.Abort(request_id=name)).SerializeToString()


DRAIN = wire.Down(drain=wire.Drain()).SerializeToString()
FIRST = st.just(hello()) | st.binary(max_size=30) | harmed(hello()) | st.just(start("a"))
DOWN = (
    st.sampled_from([*map(start, NAMES), *map(abort, NAMES), abort("unknown"), DRAIN, hello()])
    | st.sampled_from([start("x" * (MAX_ID_CHARACTERS + 1)), wire.Down().SerializeToString()])
    | harmed(start("a"))
    | st.binary(max_size=30)
)
DEEDS = st.tuples(st.sampled_from(["tokens", "failed", "rejected", "forget"]),
                  st.sampled_from(NAMES))  # fmt: skip


class Context:
    """The servicer's, of a router that reads everything."""

    def __init__(self) -> None:
        self.written: list[wire.Up] = []

    async def write(self, up: wire.Up) -> None:
        self.written.append(up)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.AbortError(details)


class Stream:
    """A router's end of a session, and the task that serves it."""

    def __init__(self, sessions: SessionServer) -> None:
        self.context = Context()
        self.says: asyncio.Queue[bytes | None] = asyncio.Queue()
        serving: Any = sessions._serve(self._requests(), self.context)  # type: ignore[arg-type]
        self.task = asyncio.create_task(serving)

    async def _requests(self) -> AsyncIterator[bytes]:
        while (data := await self.says.get()) is not None:
            yield data

    async def end(self) -> None:
        self.says.put_nowait(None)
        with suppress(grpc.aio.AbortError):
            await asyncio.wait_for(self.task, 5)


def act(sessions: SessionServer, deed: str, name: str) -> None:
    """What a worker's engine may tell at any time, of attempts that may have ended."""
    attempt = AttemptId(name, 0)
    match deed:
        case "tokens":
            sessions.tokens(TokenDelta(SequenceId(attempt, 0), 0, (1,)))
        case "failed":
            sessions.failed(Failure(attempt, FailureCode.INTERNAL, "why"))
        case "rejected":
            sessions.rejected(attempt, "full")
        case "forget":
            sessions.forget(attempt)


async def play(script: list[tuple[int, bytes] | tuple[str, str]], firsts: list[bytes]) -> None:
    worker = ScriptedWorker()
    sessions = SessionServer(INFO, worker)
    streams = [Stream(sessions) for _ in firsts]
    for stream, first in zip(streams, firsts, strict=True):
        stream.says.put_nowait(first)
    for item in script:
        for _ in range(4):
            await asyncio.sleep(0)
        if isinstance(item[0], str):
            act(sessions, *item)  # type: ignore[arg-type]
        else:
            streams[item[0]].says.put_nowait(item[1])  # type: ignore[arg-type]
    for stream in streams:
        await stream.end()
    assert sessions.attempts == 0
    assert not sessions._sessions
    ended = len(worker.aborted)
    assert ended <= len(worker.started), "nothing is aborted that was not started"
    late = Stream(sessions)
    late.says.put_nowait(hello())
    late.says.put_nowait(start("late"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert sessions.attempts == (not sessions._draining)
    await late.end()
    assert late.context.written[0].WhichOneof("message") == "welcome"


@relaxed
@given(
    st.lists(st.tuples(st.integers(0, 1), DOWN) | DEEDS, max_size=20),
    st.tuples(FIRST, st.just(hello())).map(list),
)
def test_a_worker_outlives_whatever_routers_say(
    script: list[tuple[int, bytes] | tuple[str, str]], firsts: list[bytes]
) -> None:
    asyncio.run(play(script, firsts))


# ---- a router, and what a worker says ----


def up(**fields: Any) -> bytes:
    return wire.Up(**fields).SerializeToString()


def step(*names: str, **fields: Any) -> bytes:
    tokens = [encode_delta(TokenDelta(SequenceId(AttemptId(n, 0), 0), 0, (1,))) for n in names]
    load = encode_load(ScriptedWorker().told, draining=False, transfers={})
    return up(step=wire.Step(tokens=tokens, load=load, **fields))


WELCOME = up(welcome=encode_welcome(INFO))
LONG = wire.Failed(request_id="x" * (MAX_ID_CHARACTERS + 1))
UP = (
    st.sampled_from([WELCOME, up(cache_snapshot=wire.CacheSnapshot(last=True)), up(), b""])
    | st.sampled_from([step(), step("a"), step("a", "a", "b"), step(failed=[LONG])])
    | st.sampled_from([step(singles=wire.Singles(numbers=[1], indexes=[1], tokens=[2]))])
    | harmed(step("a"))
    | harmed(WELCOME)
    | st.binary(max_size=30)
)


class Told:
    """A stream that says what is listed and ends."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = iter(messages)

    async def read(self) -> Any:
        return next(self._messages, grpc.aio.EOF)


@relaxed
@given(st.lists(UP, max_size=12), st.booleans())
def test_a_router_outlives_whatever_a_worker_says(messages: list[bytes], welcomed: bool) -> None:
    heard = Listener()
    told = Told([WELCOME, *messages] if welcomed else messages)

    async def listen() -> None:
        session = WorkerSession("unix:/nowhere", "router", heard)
        with suppress(WireError, SessionLost):
            await session._listen(told)  # type: ignore[arg-type]
            raise AssertionError("a stream that ends is a session that is lost")

    asyncio.run(listen())
    assert len(heard.openings) <= 1
    assert bool(heard.updates) == bool(heard.openings)


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_an_error_of_the_wire(data: bytes) -> None:
    for parse in (codec.parse_down, codec.parse_up):
        with suppress(WireError):
            parse(data)


@given(harmed(start("a")))
def test_an_order_that_was_harmed_is_an_order_or_an_error_of_the_wire(data: bytes) -> None:
    with suppress(WireError):
        down = codec.parse_down(data)
        if down.WhichOneof("message") == "start":
            decoded = codec.decode_start(down.start)
            assert codec.decode_start(codec.encode_start(decoded)) == decoded
    assert codec.decode_start(codec.parse_down(start("a")).start) == order("a")
