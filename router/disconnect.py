"""Noticing that a client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


class ClientLeft(Exception):
    """The client closed its connection before the answer's end."""


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel what runs inside when the client leaves, and raise ClientLeft.

    The request's body must have been read. Costs nothing while the client stays, unlike
    asking before each send.
    """
    task = asyncio.current_task()
    assert task is not None  # always so in a coroutine
    cancelling_before = task.cancelling()
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not left or task.uncancel() > cancelling_before:
            raise
        raise ClientLeft from None
    finally:
        watcher.cancel()
