"""Requests for the chaos run, and whether an answer is that of an undisturbed run."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

ANNOUNCED = (429, 503)
"""Statuses by which a server says that it is too busy, or not whole: no error of its own."""
_LOGPROBS_TOLERANCE = 1e-3


@dataclass(slots=True)
class Choice:
    """One of the outputs of a request, as far as it was told, and when (monotonic seconds)."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    times: list[float] = field(default_factory=list)

    def take(self, told: dict[str, Any]) -> None:
        """Add a choice of an event, or of the whole answer."""
        self.times.append(time.monotonic())
        self.text += told["text"]
        self.tokens += told["token_ids"]
        self.finish = told["finish_reason"] or self.finish
        self.logprobs += (told["logprobs"] or {}).get("token_logprobs", [])

    def difference(self, other: Choice) -> str | None:
        """How this one differs from another; None when it does not."""
        for name in ("tokens", "text", "finish"):
            if getattr(self, name) != getattr(other, name):
                return _differ(name, getattr(self, name), getattr(other, name))
        if len(self.logprobs) != len(other.logprobs) or any(
            abs(a - b) > _LOGPROBS_TOLERANCE
            for a, b in zip(self.logprobs, other.logprobs, strict=False)
        ):
            return "log-probabilities"
        return None


@dataclass(slots=True)
class Answer:
    """What a client was told, whether event by event or at once."""

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Any = None
    error: str | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Add an event of a stream, or the whole answer."""
        if error := event.get("error"):
            self.error = str(error.get("message", error))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.choices.setdefault(choice["index"], Choice()).take(choice)

    @property
    def refused(self) -> bool:
        """Turned away before it began, in a way that clients expect."""
        return self.status in ANNOUNCED

    def gap_around(self, moment: float) -> float | None:
        """Seconds between a choice's events before and after a moment, the most of all choices.

        None where none had two.
        """
        pairs = (pair for c in self.choices.values() for pair in itertools.pairwise(c.times))
        gaps = [after - before for before, after in pairs if before <= moment < after]
        return max(gaps, default=None)

    def difference(self, other: Answer) -> str | None:
        """How this one differs from another to the same request; None when it does not."""
        if sorted(self.choices) != sorted(other.choices):
            return _differ("choices", sorted(self.choices), sorted(other.choices))
        for number, choice in self.choices.items():
            if difference := choice.difference(other.choices[number]):
                return difference
        return None if self.usage == other.usage else _differ("usage", self.usage, other.usage)


def _differ(name: str, one: object, other: object) -> str:
    return f"{name}: {one!r:.80} instead of {other!r:.80}"


def draw_bodies(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Greedy and sampled, by one and by two, streamed and not, with penalties and without."""
    return [_draw_body(rng) for _ in range(count)]


def _draw_body(rng: random.Random) -> dict[str, Any]:
    letters = "abcdefghijklmnopqrstuvwxyz     "
    body: dict[str, Any] = {
        "prompt": "".join(rng.choices(letters, k=rng.choice((5, 60, 500)))),
        "max_tokens": rng.choice((1, 2, 30, 150, 300)),
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0,
    }
    if rng.random() < 0.6:
        body |= {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(2**64)}
        body["n"] = rng.choice((1, 2))
    if rng.random() < 0.3:
        body |= {"presence_penalty": 0.5, "repetition_penalty": 1.1}
    if rng.random() < 0.3:
        body["logprobs"] = 2
    if rng.random() < 0.7:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


async def ask(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], answer: Answer | None = None
) -> Answer:
    """Send one request; whatever goes wrong is the answer's `error`.

    `answer` is filled as it comes, for who may not wait for its end.
    """
    answer = answer or Answer()
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            answer.status = response.status_code
            if response.status_code != 200 or not body.get("stream"):
                answer.take(json.loads(await response.aread()))
                return answer
            done = False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    answer.take(json.loads(line[6:]))
            if not done and answer.error is None:
                answer.error = "the stream ended without [DONE]"
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


@dataclass(slots=True)
class Tally:
    """What all clients have been told."""

    answers: list[Answer] = field(default_factory=list)
    refused: int = 0
    errors: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    def add(self, answer: Answer, undisturbed: Answer) -> None:
        """Judge one answer."""
        self.answers.append(answer)
        if answer.refused:
            self.refused += 1
        elif answer.error is not None or answer.status != 200:
            self.errors.append(f"HTTP {answer.status}: {answer.error}")
        elif difference := answer.difference(undisturbed):
            self.mismatches.append(difference)


async def keep_asking(
    http: httpx.AsyncClient,
    url: str,
    bodies: Sequence[dict[str, Any]],
    undisturbed: Sequence[Answer],
    rng: random.Random,
    stop: asyncio.Event,
    tally: Tally,
) -> None:
    """One client: a request after the other until `stop`."""
    while not stop.is_set():
        number = rng.randrange(len(bodies))
        tally.add(await ask(http, url, bodies[number]), undisturbed[number])
        if tally.answers[-1].refused:
            await asyncio.sleep(1.0)  # what Retry-After asks for
