"""Reads a request's body: limited in size and time, valid JSON, an object."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request

from router.context import GatewayContext
from router.errors import BadRequest, BodyTimeout, BodyTooLarge
from router.fields import show

_INLINE_BYTES = 65536
"""Less is parsed in less time than a thread switch is worth."""
_DRAINED_LIMITS = 10
"""A body over the limit is read to its end, unless it is this many times the limit."""


async def read_object(request: Request, context: GatewayContext) -> dict[str, Any]:
    """The body as a JSON object, within the limits of `context`.

    Raises:
        BodyTooLarge: over `max_body_bytes`.
        BodyTimeout: not there after `body_timeout_s`.
        BadRequest: not JSON, or no object.
    """
    try:
        async with asyncio.timeout(context.body_timeout_s):
            body = await _read(request, context.max_body_bytes)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {context.body_timeout_s:g} s") from None
    # In a thread not for its own sake, as it lets none other run, but for a turn of the loop
    # before what is then done with a long prompt.
    value = _parse(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(_parse, body)
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, got {show(value)}")
    return value


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise BadRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except ValueError as error:  # a number of too many digits
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body's JSON is nested too deeply") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
            continue
        # Most clients read no answer before they have sent all: take the rest and drop it.
        chunks.clear()
        if size > max_bytes * _DRAINED_LIMITS:
            break
    if size > max_bytes:
        raise BodyTooLarge(f"the body has at least {size} bytes, the limit is {max_bytes} bytes")
    return b"".join(chunks)


def _refuse_constant(name: str) -> None:
    raise BadRequest(f"the body is not valid JSON: {name} is not a JSON number")
