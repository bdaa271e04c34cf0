"""Writing an answer's bytes on the spot, where the HTTP server lets whoever has them do so.

An ASGI application sends from a task of its own, which has to be woken for every event: that
costs more than to make the event.
"""

from __future__ import annotations

from typing import Protocol

from starlette.types import Scope

SCOPE_KEY = "hexserve.direct_write"


class DirectWrite(Protocol):
    """Writes the body of one answer. Nothing may be under way by `send` meanwhile."""

    @property
    def has_room(self) -> bool:
        """Whether `write` may be called: the body has begun, and its client is there and reads."""

    def write(self, body: bytes) -> None:
        """Send a part of the body; never waits."""


def direct_write(scope: Scope) -> DirectWrite | None:
    """That of a request; None where the server offers none."""
    found: DirectWrite | None = scope.get(SCOPE_KEY)
    return found
