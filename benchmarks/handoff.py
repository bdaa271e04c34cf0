"""What moving a long prompt's KV from prefill to decode costs, seen by the clients.

    python -m benchmarks.handoff --url http://127.0.0.1:7080 [--prompts 8] [--json FILE] [--check]

To be run against `hexserve serve --disagg_topo=1,1` that serves nobody else.

handoff  Long prompts, one at a time. Prefill gives the first token, decode the second: the time
         between them, less a quiet decode step, is what the KV still took to move after prefill
         had ended. As a share of TTFT it says how well the two overlapped.
ITL      Streams decode while long prompts come one by one. A gap between two tokens of a stream
         is busy if it touches the time from a prompt's sending to its second token, else quiet.

A token is an event that carries text: where one completes no character, a gap spans two steps.

Exit status: 0; 1 when a request fails or, with --check, when a target is missed: handoff under
10% of TTFT (median), busy ITL p99 at most 1.5 times the quiet median or 1.15 times the quiet
p99, whichever is more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.openai_stream import OpenAIStreamClient, RequestTiming, ServerError
from benchmarks.report import print_line
from benchmarks.stats import host_info, median, milliseconds, percentile
from benchmarks.workloads import random_prompt

STREAMS = 8
STREAM_PROMPT = 64
STREAM_OUTPUT = 1024
LONG_OUTPUT = 8
SETTLE_S = 4.0
PAUSE_S = 2.0
"""Between two long prompts: the quiet time that the busy one is compared with."""
MOST_SHARE, MEDIAN_FACTOR, P99_FACTOR = 0.10, 1.5, 1.15
_PIPE_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Handoff:
    """One long prompt, in seconds."""

    ttft: float
    gap: float
    """From the first token to the second."""
    step: float
    """A decode step after that."""

    @property
    def share(self) -> float:
        """Of TTFT."""
        return max(0.0, self.gap - self.step) / self.ttft


@dataclass(frozen=True, slots=True)
class Figures:
    """All that was measured; inter-token latencies in seconds."""

    handoffs: list[Handoff]
    quiet: list[float]
    busy: list[float]

    @property
    def share(self) -> float:
        """The median prompt's."""
        return median(each.share for each in self.handoffs) or 0.0

    @property
    def bound(self) -> float:
        """The most that the busy p99 may be."""
        middle, high = median(self.quiet) or 0.0, percentile(self.quiet, 99) or 0.0
        return max(MEDIAN_FACTOR * middle, P99_FACTOR * high)

    def missed(self) -> list[str]:
        """One line for each target that is not kept."""
        if not (self.handoffs and self.quiet and self.busy):
            return ["too little was measured: no long prompt, or no quiet or no busy gap"]
        lines = []
        if self.share >= MOST_SHARE:
            lines.append(f"handoff: {self.share:.1%} of TTFT, target under {MOST_SHARE:.0%}")
        busy = percentile(self.busy, 99) or 0.0
        if busy > self.bound:
            lines.append(f"busy ITL p99: {1000 * busy:.1f} ms, target {1000 * self.bound:.1f} ms")
        return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    out = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    try:
        figures = asyncio.run(measure(args))
    except ServerError as error:
        print_line(out, f"cannot measure {error}", style="red")
        return 1
    out.print(_table(figures, args.prompt_tokens))
    if args.json:
        report = {"host": host_info(), "prompt_tokens": args.prompt_tokens, **asdict(figures)}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if not args.check:
        return 0
    missed = figures.missed()
    for line in missed:
        print_line(out, f"missed: {line}", style="red")
    if not missed:
        print_line(out, "check passed", style="green")
    return 1 if missed else 0


async def measure(args: argparse.Namespace) -> Figures:
    """Both parts, one after the other. Raises ServerError when a request fails."""
    rng = random.Random(args.seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=600.0, limits=limits, trust_env=False) as http:
        client = OpenAIStreamClient(http, args.url)
        await client.discover_model()

        async def send_long() -> RequestTiming:
            body = client.encode(random_prompt(rng, args.prompt_tokens), LONG_OUTPUT)
            return _whole(await client.send(body, LONG_OUTPUT))

        await send_long()  # not counted
        handoffs = [_handoff(await send_long()) for _ in range(args.prompts)]
        return Figures(handoffs, *await _stream(client, rng, send_long, args))


async def _stream(
    client: OpenAIStreamClient,
    rng: random.Random,
    send_long: Callable[[], Awaitable[RequestTiming]],
    args: argparse.Namespace,
) -> tuple[list[float], list[float]]:
    """Quiet and busy gaps of the streams."""
    stop = asyncio.Event()

    async def decode() -> list[RequestTiming]:
        timings = []
        while not stop.is_set():
            body = client.encode(random_prompt(rng, STREAM_PROMPT), STREAM_OUTPUT)
            timings.append(_whole(await client.send(body, STREAM_OUTPUT, stop)))
        return timings

    decoders = [asyncio.create_task(decode()) for _ in range(STREAMS)]
    try:
        await asyncio.sleep(args.settle)
        start = time.perf_counter()
        windows = []
        for _ in range(args.prompts):
            long = await send_long()
            windows.append((long.sent, long.event_times[1]))
            await asyncio.sleep(args.pause)
        stop.set()
        streams = [timing for timings in await asyncio.gather(*decoders) for timing in timings]
    finally:
        for task in decoders:
            task.cancel()
    return split_gaps([gap for timing in streams for gap in timing.gaps], windows, start)


def split_gaps(
    gaps: Sequence[tuple[float, float]], windows: Sequence[tuple[float, float]], start: float
) -> tuple[list[float], list[float]]:
    """The lengths of the gaps that touch no window, and of those that do, from `start` on."""
    quiet: list[float] = []
    busy: list[float] = []
    for earlier, later in gaps:
        if earlier < start:
            continue
        touched = any(earlier <= end and later >= begin for begin, end in windows)
        (busy if touched else quiet).append(later - earlier)
    return quiet, busy


def _whole(timing: RequestTiming) -> RequestTiming:
    if timing.error or (len(timing.event_times) < 3 and not timing.stopped):
        raise ServerError(timing.error or "a stream of fewer than three tokens")
    return timing


def _handoff(timing: RequestTiming) -> Handoff:
    first, *rest = timing.itls
    assert timing.ttft is not None
    return Handoff(timing.ttft, first, median(rest) or 0.0)


def _table(figures: Figures, prompt_tokens: int) -> Table:
    table = Table(title=f"handoff of {prompt_tokens}-token prompts", show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")

    def row(name: str, seconds: float | None) -> None:
        value = milliseconds(seconds)
        table.add_row(name, "-" if value is None else f"{value:,.1f} ms")

    row("TTFT, median", median(each.ttft for each in figures.handoffs))
    row("first to second token, median", median(each.gap for each in figures.handoffs))
    row("a step after that, median", median(each.step for each in figures.handoffs))
    table.add_row("handoff / TTFT, median", f"{figures.share:.1%} (< {MOST_SHARE:.0%})")
    row(f"{STREAMS} streams, quiet ITL p50", percentile(figures.quiet, 50))
    row("quiet ITL p99", percentile(figures.quiet, 99))
    row("busy ITL p50", percentile(figures.busy, 50))
    row(f"busy ITL p99 (≤ {1000 * figures.bound:.1f})", percentile(figures.busy, 99))
    return table


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.handoff", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--url", required=True)
    parser.add_argument("--prompts", type=_positive, default=8, help="of each part; default 8")
    parser.add_argument("--prompt_tokens", type=int, default=2000)
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
