"""A streamed answer as server-sent events, sent with as little work per event as can be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.choices import Choices
from router.direct_write import DirectWrite, direct_write
from router.disconnect import ClientLeft, cancelled_on_disconnect
from router.errors import GenerationFailed, ServingError
from router.output import Piece
from router.request_log import body_sender

log = logging.getLogger("hexserve.router")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # reverse proxies would collect events otherwise
]


class StreamedAnswer(Protocol):
    """What an API sends for what happens; each method gives one or more whole events.

    `number` is the choice's; `usage` is the request's so far, and None unless
    `usage_in_pieces`.
    """

    @property
    def usage_in_pieces(self) -> bool: ...

    def first_events(self, number: int, piece: Piece, usage: dict[str, object] | None) -> bytes:
        """Those of a choice's first piece."""

    def piece_event(self, number: int, piece: Piece, usage: dict[str, object] | None) -> bytes:
        """That of a further piece."""

    def last_events(self, usage: dict[str, object]) -> bytes:
        """After the last piece of the last choice."""

    def error_event(self, error: ServingError) -> bytes:
        """In place of whatever would have followed; nothing is sent after it."""


class EventStream(Response):
    """Sends pieces as they come. A client that leaves ends all choices at once. See `begin`.

    Pieces of a lone choice are mostly sent on the spot; see router.sequence.PieceStream.
    """

    def __init__(
        self,
        first: tuple[int, Piece],
        pieces: AsyncGenerator[tuple[int, Piece], None],
        choices: Choices,
        answer: StreamedAnswer,
    ) -> None:
        super().__init__()
        self._first = first
        self._pieces = pieces
        self._choices = choices
        self._answer = answer
        self._continuous = answer.usage_in_pieces
        self._direct: DirectWrite | None = None
        self._added = b""

    @classmethod
    async def begin(cls, choices: Choices, answer: StreamedAnswer) -> EventStream:
        """Wait for the first piece.

        Raises:
            ServingError: an error before it, which has an HTTP status of its own. One after it
                becomes an event, the stream's last.
        """
        pieces = choices.pieces()
        return cls(await anext(pieces), pieces, choices, answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        try:
            async with aclosing(self._pieces), cancelled_on_disconnect(receive):
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                self._direct = direct_write(scope)
                try:
                    # In a task of its own: every event would pass all of the caller's frames.
                    await asyncio.create_task(self._send_events(body_sender(scope, send)))
                except ServingError as error:
                    await send(_body(self._answer.error_event(error)))
                except Exception:
                    log.exception("a stream broke")
                    failure = GenerationFailed("internal error")
                    await send(_body(self._answer.error_event(failure)))
                await send({"type": "http.response.body", "body": b""})
        except ClientLeft:
            log.debug("a client left its stream")

    # ---- router.sequence.PieceStream, of choice 0 ----

    @property
    def has_room(self) -> bool:
        return self._direct is not None and self._direct.has_room

    def add(self, piece: Piece) -> None:
        usage = self._choices.usage() if self._continuous else None
        self._added += self._answer.piece_event(0, piece, usage)

    def write(self) -> None:
        if self._added and self._direct is not None:
            self._direct.write(self._added)
            self._added = b""

    async def _send_events(self, send: Send) -> None:
        answer, usage = self._answer, self._choices.usage
        continuous = self._continuous
        number, piece = self._first
        await send(_body(answer.first_events(number, piece, usage() if continuous else None)))
        if self._direct is not None:
            self._choices.send_to(self)
        begun = {number}
        async for number, piece in self._pieces:
            current = usage() if continuous else None
            if number in begun:
                await send(_body(answer.piece_event(number, piece, current)))
            else:
                begun.add(number)
                await send(_body(answer.first_events(number, piece, current)))
        await send(_body(answer.last_events(usage())))


def _body(events: bytes) -> Message:
    return {"type": "http.response.body", "body": events, "more_body": True}
