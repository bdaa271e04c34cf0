"""Clients that leave at random moments of their requests: whatever of them stays adds up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from benchmarks.chaos_leaks import resident_bytes
from benchmarks.chaos_report import Outcome
from benchmarks.chaos_requests import Answer, ask

AT_ONCE = 24
SAMPLES = 200
"""How often memory is looked at."""
_STAY = 0.15
"""As many clients stay, and are answered as ever."""
_PATIENCE_S = (0.001, 1.0)
"""Of those who leave, on a logarithmic scale: from before the first message to the last token."""


def draw_leaving(rng: random.Random, count: int, bodies: int) -> list[tuple[int, float | None]]:
    """(number of the body, how long its client waits: None for ever) of each request."""
    low, high = _PATIENCE_S
    return [
        (
            rng.randrange(bodies),
            None if rng.random() < _STAY else low * (high / low) ** rng.random(),
        )
        for _ in range(count)
    ]


async def leave_at_random(
    http: httpx.AsyncClient,
    url: str,
    bodies: Sequence[dict[str, Any]],
    undisturbed: Sequence[Answer],
    leaving: Sequence[tuple[int, float | None]],
    pids: Callable[[], Mapping[str, int]],
    outcome: Outcome,
) -> None:
    """Send all requests, AT_ONCE at a time; note memory, phases, and what those who stay get."""
    every = max(1, len(leaving) // SAMPLES)

    def sampled() -> Iterator[tuple[int, float | None]]:
        for number, each in enumerate(leaving):
            if number % every == 0:
                for name, pid in pids().items():
                    if (size := resident_bytes(pid)) is not None:
                        outcome.memory.setdefault(name, []).append(size)
            yield each

    requests = sampled()  # shared by all clients

    async def client() -> None:
        for body, patience_s in requests:
            answer = Answer()
            try:
                async with asyncio.timeout(patience_s):
                    await ask(http, url, bodies[body], answer)
            except TimeoutError:
                outcome.aborted["amid the answer" if answer.choices else "before it"] += 1
            else:
                outcome.aborted["served"] += 1
                outcome.tally.add(answer, undisturbed[body])

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(client())
