"""A streamed answer as server-sent events, sent with as little work per event as can be."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.answers import DONE_EVENT, Answer, event
from router.disconnect import ClientLeft, cancelled_on_disconnect
from router.errors import GenerationFailed, ServingError
from router.output import Piece
from router.sampling import RequestOptions
from router.sequence import TextSequence

log = logging.getLogger(__name__)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # reverse proxies would collect events otherwise
]


class EventStream(Response):
    """Sends pieces as they come. A client that leaves closes `pieces` at once.

    Args:
        first: the first piece, already taken from `pieces`: errors before it have had an
            HTTP status of their own. An error after it becomes an event, the stream's last.
    """

    def __init__(
        self,
        first: Piece,
        pieces: AsyncGenerator[Piece, None],
        *,
        sequence: TextSequence,
        answer: Answer,
        options: RequestOptions,
    ) -> None:
        super().__init__()
        self._first = first
        self._pieces = pieces
        self._sequence = sequence
        self._answer = answer
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        try:
            async with aclosing(self._pieces), cancelled_on_disconnect(receive):
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                async with aclosing(self._events()) as events:
                    async for body in events:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except ClientLeft:
            log.debug("a client left its stream")

    async def _events(self) -> AsyncGenerator[bytes, None]:
        answer = self._answer
        continuous = self._options.continuous_usage
        try:
            usage = self._sequence.usage() if continuous else None
            yield answer.first_events(self._first, usage)
            async for piece in self._pieces:
                yield answer.piece_event(piece, self._sequence.usage() if continuous else None)
            if self._options.include_usage:
                yield answer.usage_event(self._sequence.usage())
            yield DONE_EVENT
        except ServingError as error:
            yield event(error.body())
        except Exception:
            log.exception("a stream broke")
            yield event(GenerationFailed("internal error").body())
