"""Whole answers as bytes; long ones are made in a thread, as others' streams would stall."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from router.answers import encode_json
from router.json_parts import written
from router.output import Piece

INLINE_ENTRIES = 1000
"""Fewer are written in less than ten milliseconds or so."""
_ENTRIES_AT_ONCE = 32
"""Of tokens with up to 20 alternatives: a millisecond or so, for which nothing else runs."""


async def answer_bytes(
    make: Callable[[], dict[str, Any]], outputs: Sequence[Piece], listed_tokens: int = 0
) -> bytes:
    """The JSON of the answer that `make` makes of `outputs`.

    `listed_tokens`: ids in it besides those tokens that have log-probabilities.
    """
    echoed = sum(len(o.echoed["tokens"]) for o in outputs if o.echoed is not None)
    entries = sum(len(o.scored) for o in outputs) + echoed + listed_tokens
    if entries <= INLINE_ENTRIES:
        return encode_json(make()).encode()
    return await asyncio.to_thread(lambda: _written(make()))


def _written(answer: dict[str, Any]) -> bytes:
    fields = (f"{encode_json(name)}:{_field(name, value)}" for name, value in answer.items())
    return f"{{{','.join(fields)}}}".encode()


def _field(name: str, value: Any) -> str:
    if name == "choices":  # few, and each may have long lists
        return f"[{','.join(written(choice, _ENTRIES_AT_ONCE) for choice in value)}]"
    return written(value, _ENTRIES_AT_ONCE)
