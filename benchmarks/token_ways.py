"""The two ways of a token from a worker to a client, and when it has arrived.

Direct is a bare session with the worker, as a router holds one; routed is HTTP, read from
bare sockets. A time is taken as soon as a message or bytes are there, before they are looked
at, so whatever the router does with a message counts as the router's.
"""

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, cast

import grpc
import numpy as np

from benchmarks.token_stamps import Nanoseconds, prompt_of, token_at
from engine.types import COLOCATED, AttemptId, SamplingParams, SequenceId, SequenceRequest
from protos import worker_pb2 as wire
from protos.codec import MESSAGE_LIMITS, PROTOCOL_VERSION, StartOrder, decode_step, encode_start
from protos.session_server import SERVICE
from protos.singles_codec import Names

_EVENT = re.compile(rb"data: ([^\n]*)\n\n")
_SHOWN_BYTES = 300


class WayError(Exception):
    """Not every token has come, or not as it was sent."""


class Way(Protocol):
    """Asks for `tokens` tokens of each request, all at once.

    Returns the arrival of every token, in one row for each request. Raises WayError.
    """

    async def __call__(self, requests: Sequence[int], tokens: int) -> Nanoseconds: ...


class DirectWay:
    """One session for all requests."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def __call__(self, requests: Sequence[int], tokens: int) -> Nanoseconds:
        async with grpc.aio.insecure_channel(self._address, options=MESSAGE_LIMITS) as channel:
            session = channel.stream_stream(
                f"/{SERVICE}/Session",
                request_serializer=wire.Down.SerializeToString,
                response_deserializer=wire.Up.FromString,
            )()
            try:
                return await _ask(session, requests, tokens)
            except grpc.aio.AioRpcError as error:
                raise WayError(f"the session with the worker: {error.details()}") from error
            finally:
                session.cancel()


async def _ask(
    session: grpc.aio.StreamStreamCall, requests: Sequence[int], tokens: int
) -> Nanoseconds:
    rows = {f"request-{request}": row for row, request in enumerate(requests)}
    arrivals = np.zeros((len(rows), tokens), np.int64)
    missing, names = arrivals.size, Names()
    hello = wire.Hello(protocol_version=PROTOCOL_VERSION, router_id="benchmark")
    await session.write(wire.Down(hello=hello))
    for name, request in zip(rows, requests, strict=True):
        await session.write(wire.Down(start=_start(name, request, tokens)))
    while missing:
        up = await session.read()
        now = time.monotonic_ns()
        if up is grpc.aio.EOF:
            raise WayError("the worker has closed the session")
        if up.step.failed or up.step.rejected:
            raise WayError(f"the worker does not serve: {up.step}")
        for part in decode_step(up.step, names).deltas:
            end = part.index + len(part.tokens)
            if list(part.tokens) != [token_at(index) for index in range(part.index, end)]:
                raise WayError(f"tokens from {part.index} on are {list(part.tokens)}")
            arrivals[rows[part.id.attempt.request_id], part.index : end] = now
            missing -= len(part.tokens)
    return arrivals


def _start(name: str, request: int, tokens: int) -> wire.Start:
    attempt = AttemptId(name, 0)
    sampling = SamplingParams(max_tokens=tokens)
    sequence = SequenceRequest(SequenceId(attempt, 0), COLOCATED, prompt_of(request), sampling)
    return encode_start(StartOrder(attempt, (sequence,), ()))


class RoutedWay:
    """One connection for each request, all open before the first is sent."""

    def __init__(self, url: str) -> None:
        """`url` is http://HOST:PORT. `last_answer` is one of the last HTTP answers, whole."""
        self._host, _, port = url.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self.last_answer = b""

    async def __call__(self, requests: Sequence[int], tokens: int) -> Nanoseconds:
        connections: list[_Connection] = []
        try:
            for _ in requests:
                connections.append(await self._connect())
            for connection, request in zip(connections, requests, strict=True):
                connection.send(self._http_request(request, tokens))
            for connection in connections:
                await connection.ended.wait()
        finally:
            for connection in connections:
                connection.close()
        self.last_answer = b"".join(data for _, data in connections[-1].reads)
        return np.array([event_arrivals(each.reads, tokens) for each in connections], np.int64)

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        except OSError as error:
            raise WayError(f"no connection to the router: {error}") from error
        return connection

    def _http_request(self, request: int, tokens: int) -> bytes:
        body = json.dumps(
            {
                "prompt": prompt_of(request),
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + body


class _Connection(asyncio.Protocol):
    """Keeps what it reads, and when, until the server closes."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, bytes]] = []
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.monotonic_ns(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


def event_arrivals(reads: Sequence[tuple[int, bytes]], tokens: int) -> list[int]:
    """When each token of a streamed HTTP answer was there: with the last byte of its event.

    An event must lie in one chunk of the transfer encoding.

    Raises:
        WayError: the answer is another, or not all of it.
    """
    answer = b"".join(data for _, data in reads)
    if not answer.startswith(b"HTTP/1.1 200 "):
        shown = answer[:_SHOWN_BYTES].decode(errors="replace")
        raise WayError(f"the router answers {shown!r}")
    read_ends = list(accumulate(len(data) for _, data in reads))
    ids: list[int] = []
    arrivals: list[int] = []
    for match in _EVENT.finditer(answer):
        if match[1] == b"[DONE]":
            break
        new = _token_ids(match[1])
        ids += new
        arrivals += [reads[bisect_left(read_ends, match.end())][0]] * len(new)
    else:
        raise WayError("a stream has ended without [DONE]")
    if ids != [token_at(index) for index in range(tokens)]:
        raise WayError(f"{tokens} tokens were sent and {len(ids)} came, or not the same ones")
    return arrivals


def streamed_events(answer: bytes) -> bytes:
    """The body of a streamed HTTP answer whose events each lie in one chunk."""
    return b"".join(match[0] for match in _EVENT.finditer(answer))


def _token_ids(data: bytes) -> list[int]:
    try:
        event: dict[str, Any] = json.loads(data)
        ids: list[int] = event["choices"][0]["token_ids"]
    except (ValueError, LookupError, TypeError) as error:
        shown = data[:_SHOWN_BYTES].decode(errors="replace")
        raise WayError(f"an event is {shown!r}") from error
    return ids
