"""One log line per HTTP request: what was asked, how it ended, how long it took. No content."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.record import RequestRecord

log = logging.getLogger("hexserve.request")

_RECORD = "hexserve.record"
_SEND = "hexserve.send"
_MAX_ID_LENGTH = 128
_SHOWN_PATH = 100


def record_of(request: Request) -> RequestRecord:
    """The record of a request that came by way of RequestLog."""
    record: RequestRecord = request.scope[_RECORD]
    return record


def body_sender(scope: Scope, send: Send) -> Send:
    """What sends a begun response's body by the shortest way.

    Whatever wraps `send` further in only wants to know whether the response has begun, and would
    cost as much per event as the rest of its way. `send` itself where RequestLog was not passed.
    """
    shortest: Send = scope.get(_SEND, send)
    return shortest


class RequestLog:
    """ASGI middleware: gives each request its record and its id, and logs it at its end.

    The id is the client's X-Request-Id, else random; the answer's X-Request-Id tells it.

    Args:
        probed: paths whose requests are logged at DEBUG only, as something asks every second.
    """

    def __init__(self, app: ASGIApp, *, probed: Collection[str]) -> None:
        self._app = app
        self._probed = probed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope))
        id_header = (b"x-request-id", record.id.encode())
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), id_header]}
            await send(message)

        try:
            await self._app({**scope, _RECORD: record, _SEND: send}, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in self._probed else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "%s", _line(record, scope, status))


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            wanted: str = value.decode("latin-1")
            if wanted.isascii() and wanted.isprintable() and 0 < len(wanted) <= _MAX_ID_LENGTH:
                return wanted
    return secrets.token_hex(16)


def _line(record: RequestRecord, scope: Scope, status: int) -> str:
    path = ascii(scope["path"])[1:-1][:_SHOWN_PATH]  # no line breaks, whatever the client sends
    parts = [f"{record.id}: {scope['method']} {path} {status}"]
    if record.prompt_tokens:
        parts.append(f"{record.prompt_tokens} prompt and {record.output_tokens} output tokens")
    if record.first_token_s is not None:
        parts.append(f"first token after {record.first_token_s:.3f} s")
    parts.append(f"{time.perf_counter() - record.arrived:.3f} s in all")
    if record.reasons:
        parts.append("/".join(sorted(record.reasons)))
    return ", ".join(parts)
