"""HTTP connections of which no request comes: cut, as each costs a descriptor for good."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_WITHIN_S = 20.0
"""How long the head of a connection's first request may take; for the next ones uvicorn has a
limit of its own."""


class PromptHTTPProtocol(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """uvicorn's protocol, but that it waits for a first request only so long."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._head_limit = self.loop.call_later(HEAD_WITHIN_S, self._check_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_limit.cancel()
        super().connection_lost(exc)

    def _check_head(self) -> None:
        cycle: Any = self.cycle  # made when a head is complete
        if cycle is None and not self.transport.is_closing():
            self.transport.close()
