"""Part a: a chat of several turns, by several users at once, with one system prompt.

Prompts are token ids, so a turn begins exactly with the tokens of those before it and their
answers. Each user sends the next turn when the last one has been answered.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.caching_part import Part, serving
from benchmarks.openai_stream import ServerError
from benchmarks.stats import median, milliseconds, percentile, ratio
from benchmarks.workloads import random_prompt

MOST_COMPUTED = 1.05
"""Prompt tokens computed, of the distinct tokens."""
MOST_TTFT = 0.25
"""TTFT with the cache, of that without; of all turns but the first."""
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ChatShape:
    """How many users and turns; the others are tokens."""

    users: int = 8
    turns: int = 6
    system: int = 1024
    question: int = 96
    answer: int = 48

    @property
    def longest(self) -> int:
        return self.system + self.turns * (self.question + self.answer)


@dataclass(slots=True)
class Turn:
    """One request as its client saw it; seconds."""

    number: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    cached: int = 0
    ttft: float = 0.0


def measure_chat(
    args: argparse.Namespace, progress: Callable[[str], None], shape: ChatShape | None = None
) -> Part:
    """Play the same chat on a server with the cache and on one without.

    Raises:
        StartError: a server did not come up.
        ServerError: a request failed.
    """
    shape = shape or ChatShape()
    flags = [f"--model={args.model}", "--block_size=16", "--prefill_len_padding=16"]
    flags += [f"--max_model_len={shape.longest + 16}", f"--max_decode_seqs={shape.users}"]
    if args.disagg_topo is not None:
        flags.append(f"--disagg_topo={args.disagg_topo}")
    ways: dict[str, list[Turn]] = {}
    for way, more in (("cache", ["--enable_prefix_cache_hbm"]), ("no cache", [])):
        progress(f"a: {shape.users} users, {shape.turns} turns, {way}")
        with serving(*flags, *more) as url:
            ways[way] = asyncio.run(_play(url, shape, args.seed))
    return summary(shape, ways)


def summary(shape: ChatShape, ways: dict[str, list[Turn]]) -> Part:
    """The figures of each way; the first is held against the second."""
    rows: dict[str, list[float | None]] = {}
    for turns in ways.values():
        later = [turn.ttft for turn in turns if turn.number > 0]
        first = [turn.ttft for turn in turns if turn.number == 0]
        computed = sum(len(turn.prompt) - turn.cached for turn in turns)
        for name, value in {
            "prompt tokens": sum(len(turn.prompt) for turn in turns),
            "prompt tokens computed": computed,
            "distinct tokens": distinct_tokens(turns),
            "TTFT p50 ms, turn 1": milliseconds(median(first)),
            "TTFT p50 ms, other turns": milliseconds(median(later)),
            "TTFT p99 ms, other turns": milliseconds(percentile(later, 99)),
        }.items():
            rows.setdefault(name, []).append(value)
    later_ms = rows["TTFT p50 ms, other turns"]
    return Part(
        f"{shape.users} users, {shape.turns} turns, a system prompt of {shape.system} tokens",
        tuple(ways),
        {name: tuple(values) for name, values in rows.items()},
        {
            "computed, of the distinct": (
                ratio(rows["prompt tokens computed"][0], rows["distinct tokens"][0]),
                MOST_COMPUTED,
            ),
            "TTFT of other turns, of that without": (ratio(*later_ms[:2]), MOST_TTFT),
        },
    )


def distinct_tokens(turns: list[Turn]) -> int:
    """Tokens of prompts and outputs; those that begin alike count once."""
    texts = sorted([*turn.prompt, *turn.output] for turn in turns)
    total, before = 0, list[int]()
    for text in texts:  # in order, each shares the most with the one before it
        shared = 0
        while shared < min(len(text), len(before)) and text[shared] == before[shared]:
            shared += 1
        total += len(text) - shared
        before = text
    return total


async def _play(url: str, shape: ChatShape, seed: int) -> list[Turn]:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as http:

        async def some(count: int) -> list[int]:
            return await _tokens(http, random_prompt(rng, count), count)

        system = await some(shape.system)
        questions = [
            [await some(shape.question) for _ in range(shape.turns)] for _ in range(shape.users)
        ]

        async def user(asked: list[list[int]]) -> list[Turn]:
            prompt, turns = system, list[Turn]()
            for number, question in enumerate(asked):
                turns.append(await _ask(http, number, prompt + question, shape.answer))
                prompt = turns[-1].prompt + turns[-1].output
            return turns

        chats = await asyncio.gather(*map(user, questions))
    return [turn for chat in chats for turn in chat]


async def _tokens(http: httpx.AsyncClient, text: str, count: int) -> list[int]:
    """The first `count` ids of a text that has as many."""
    answer = await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    if answer.status_code != 200:
        raise ServerError(f"/tokenize: HTTP {answer.status_code}: {answer.text[:300]}")
    ids: list[int] = answer.json()["tokens"][:count]
    assert len(ids) == count, f"{len(ids)} tokens, {count} are wanted"
    return ids


async def _ask(http: httpx.AsyncClient, number: int, prompt: list[int], tokens: int) -> Turn:
    turn = Turn(number, prompt)
    body = {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    sent = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/completions", content=data) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise ServerError(f"HTTP {answer.status_code}: {text[:300]}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    _take(json.loads(line[6:]), turn, time.perf_counter() - sent)
    except httpx.HTTPError as error:
        raise ServerError(f"{type(error).__name__}: {error}") from error
    if len(turn.output) != tokens:
        raise ServerError(f"{len(turn.output)} output tokens came, {tokens} were asked for")
    return turn


def _take(event: dict[str, Any], turn: Turn, elapsed: float) -> None:
    if "error" in event:
        raise ServerError(f"error event: {event['error']}"[:300])
    for choice in event["choices"]:
        if choice["token_ids"] and not turn.output:
            turn.ttft = elapsed
        turn.output += choice["token_ids"]
    if usage := event.get("usage"):
        turn.cached = usage["prompt_tokens_details"]["cached_tokens"]
