"""HTTP connections: those of which no request comes are cut, and streams may write on the spot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.direct_write import SCOPE_KEY

HEAD_WITHIN_S = 20.0
"""How long the head of a connection's first request may take; for the next ones uvicorn has a
limit of its own."""


class DirectBody:
    """The body of one answer in chunks; see router.direct_write.DirectWrite."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def has_room(self) -> bool:
        cycle = self._cycle
        return (
            not self._flow.write_paused
            and not cycle.disconnected
            and cycle.chunked_encoding is True
            and not cycle.response_complete
        )

    def write(self, body: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class PromptHTTPProtocol(HttpToolsProtocol):
    """uvicorn's protocol, but that it waits for a first request only so long.

    Requests can have their answers written by `router.direct_write`.
    """

    _cycles: Sequence[RequestResponseCycle] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_limit = self.loop.call_later(HEAD_WITHIN_S, self._check_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_limit.cancel()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells none but the last of pipelined ones
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # makes the cycle; its task does not run before this returns
        scope: Any = self.scope
        scope[SCOPE_KEY] = DirectBody(self.cycle)
        self._cycles = [*(c for c in self._cycles if not c.response_complete), self.cycle]

    def _check_head(self) -> None:
        cycle: Any = self.cycle  # made when a head is complete
        if cycle is None and not self.transport.is_closing():
            self.transport.close()
