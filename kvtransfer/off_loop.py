"""Long work on bytes in another thread: the loop that it came from serves others as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

WORTH_A_THREAD_BYTES = 256 << 10
"""Less is copied and summed up in the time that another thread takes to answer."""


async def off_loop(nbytes: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """What `work(*args)` returns or raises; `nbytes` says how long it will take."""
    if nbytes < WORTH_A_THREAD_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
