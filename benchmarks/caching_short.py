"""How long short prompts wait for a long one that came before them.

    python -m benchmarks.caching_short [--url http://127.0.0.1:7080] [--json FILE] [--check]

Twenty short prompts are sent at once: alone, and right after a long one has begun. Their TTFT
beside the long prompt is to be that of the same twenty alone, but for the chunk that is being
computed. Without `--url` a prefill worker's engine serves them, on the fake model with steps that
take as long as a real one's; once with --enable_chunked_prefill and, to show what it is good for,
once without. With `--url` a server does that serves nobody else.

Exit status: 0; 1 when a request fails or, with --check, when the p99 of the short prompts' TTFT is
more than 1.5 times that of the twenty alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.caching_part import Part
from benchmarks.openai_stream import OpenAIStreamClient, ServerError
from benchmarks.paced_engine import PacedPrefill
from benchmarks.report import print_line
from benchmarks.stats import host_info, median, milliseconds, percentile
from benchmarks.workloads import random_prompt
from settings.config import EngineConfig

LONG, SHORT, COUNT = 7500, 128, 20
STEP_S, TOKEN_S = 0.002, 20e-6
"""Of the paced engine: 12 ms for a chunk of 512 tokens, 5 ms for a short prompt."""
MOST = 1.5
"""Short TTFT p99, of that of the same prompts alone."""
ROUNDS = 5
_PIPE_WIDTH = 100

SendPrompt = Callable[[int], Awaitable[float]]
"""Tokens of a new prompt → its TTFT in seconds."""


@dataclass(frozen=True, slots=True)
class Figures:
    """TTFTs in seconds, one entry a round: p99 of the short prompts, and the long prompt's."""

    short_alone: list[float]
    short_beside: list[float]
    long_alone: list[float]
    long_beside: list[float]

    @property
    def factor(self) -> float:
        """Short prompts beside the long one against alone; the medians of the rounds."""
        return (median(self.short_beside) or 0.0) / (median(self.short_alone) or 1.0)


async def measure(send: SendPrompt, rounds: int, head_start_s: float, long: int) -> Figures:
    """`rounds` of both, by turns. The long prompt is `head_start_s` ahead."""

    async def shorts() -> float:
        return percentile(await _together([send(SHORT) for _ in range(COUNT)]), 99) or 0.0

    async def shorts_later() -> float:
        await asyncio.sleep(head_start_s)
        return await shorts()

    figures = Figures([], [], [], [])
    await shorts()  # not counted
    for _ in range(rounds):
        figures.short_alone.append(await shorts())
        figures.long_alone.append(await send(long))
        beside, with_shorts = await _together([shorts_later(), send(long)])
        figures.short_beside.append(beside)
        figures.long_beside.append(with_shorts)
    return figures


async def _together(all_of_them: Sequence[Awaitable[float]]) -> list[float]:
    """What they give; when one fails, the others are given up first."""
    tasks = [asyncio.ensure_future(each) for each in all_of_them]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure_paced(rounds: int, *, chunked: bool, long: int = LONG) -> Figures:
    """On the fake model, by a prefill worker's engine with its defaults."""
    config = EngineConfig(enable_chunked_prefill=chunked)
    with PacedPrefill(config, STEP_S, TOKEN_S) as engine:
        # By then the first chunk is under way, and most of the long prompt is left.
        return await measure(engine.ttft, rounds, 2 * STEP_S, long)


async def measure_server(url: str, rounds: int, head_start_s: float, long: int) -> Figures:
    """Of a server. Raises ServerError when a request fails."""
    rng = random.Random(0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=600.0, limits=limits, trust_env=False) as http:
        client = OpenAIStreamClient(http, url)
        await client.discover_model()

        async def send(tokens: int) -> float:
            timing = await client.send(client.encode(random_prompt(rng, tokens), 2), 2)
            if timing.error or timing.ttft is None:
                raise ServerError(timing.error or "a stream without a token")
            return timing.ttft

        return await measure(send, rounds, head_start_s, long)


def measure_short(args: argparse.Namespace, progress: Callable[[str], None]) -> Part:
    """On the paced fake model, with chunked prefill and without; `args` has no say in it."""
    progress(f"c: {COUNT} short prompts beside one of {LONG} tokens")
    return summary(asyncio.run(_measure_both(ROUNDS, LONG)), LONG)


async def _measure_both(rounds: int, long: int) -> dict[str, Figures]:
    return {
        "chunked prefill": await measure_paced(rounds, chunked=True, long=long),
        "prompts in order": await measure_paced(rounds, chunked=False, long=long),
    }


def summary(measured: dict[str, Figures], long: int) -> Part:
    """The figures of each way; the first is to keep the target."""

    def row(values: Callable[[Figures], Sequence[float]]) -> tuple[float | None, ...]:
        return tuple(milliseconds(median(values(figures))) for figures in measured.values())

    return Part(
        title=f"c: {COUNT} prompts of {SHORT} tokens beside one of {long}",
        columns=tuple(measured),
        rows={
            "short TTFT p99 alone, ms": row(lambda figures: figures.short_alone),
            "short TTFT p99 beside the long one, ms": row(lambda figures: figures.short_beside),
            "of that alone": tuple(figures.factor for figures in measured.values()),
            "long TTFT alone, ms": row(lambda figures: figures.long_alone),
            "long TTFT beside the short ones, ms": row(lambda figures: figures.long_beside),
        },
        bounds={"short TTFT p99, of that alone": (next(iter(measured.values())).factor, MOST)},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    out = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    try:
        if args.url is None:
            measured = asyncio.run(_measure_both(args.rounds, args.long))
        else:
            served = measure_server(args.url, args.rounds, args.head_start, args.long)
            measured = {args.url: asyncio.run(served)}
    except ServerError as error:
        print_line(out, f"cannot measure {error}", style="red")
        return 1
    part = summary(measured, args.long)
    out.print(part.table())
    if args.json:
        rounds = {way: asdict(figures) for way, figures in measured.items()}
        report = {"host": host_info(), **part.as_json(), "rounds": rounds}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    for line in part.missed if args.check else ():
        print_line(out, f"missed: {line}", style="red")
    return 1 if args.check and part.missed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.caching_short", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--url", help="a server's; default: the paced fake model")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--long", type=int, default=LONG, help=f"tokens; default {LONG}")
    parser.add_argument(
        "--head_start", type=float, default=0.5, help="seconds of the long prompt, with --url"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
