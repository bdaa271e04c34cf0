"""A client of a deployment, and what it may count on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from router.errors import ServingError
from tests.services.deployment import Deployment, collect, eventually, expected, prompt_of

PROMPT = prompt_of(21)
ERROR_WITHIN_S = 2.0


class Client:
    """Reads one stream to its end; shows what has come so far."""

    def __init__(self, served: Deployment, prompt: Sequence[int] = PROMPT, **sampling: object):
        self.prompt = prompt
        self.tokens: list[int] = []
        self._stream = served.stream(prompt, **{"max_tokens": 30, **sampling})
        self.task = asyncio.create_task(collect(self._stream, self.tokens))

    async def has(self, count: int) -> None:
        await eventually(lambda: len(self.tokens) >= count)

    async def ends_right(self, count: int = 30) -> None:
        tokens, finish = await asyncio.wait_for(self.task, 10)
        assert finish is not None
        assert tokens == expected(self.prompt, count)

    async def is_told(self, *errors: type[ServingError]) -> None:
        """An error, and soon; what came before it is right."""
        began = time.monotonic()
        with pytest.raises(errors):
            await asyncio.wait_for(self.task, ERROR_WITHIN_S)
        assert time.monotonic() - began < ERROR_WITHIN_S
        assert self.tokens == expected(self.prompt, len(self.tokens))
