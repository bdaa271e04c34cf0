"""Whether streams stall while long prompts arrive: their ITL beside that of quiet times.

    python -m benchmarks.long_prompts [--streams 64] [--characters 100000] [--every 0.25] [--check]

A worker without an engine (benchmarks/paced_worker.py) gives every stream a token at a fixed
pace, so whatever else lies between two of a stream's tokens is the router's. Each round takes the
streams once with nothing beside them, and once while prompts of --characters arrive, one every
--every seconds, in turns as text, as a chat, as token ids, with echo, and at /tokenize; each is
answered with one token. The figure is the ITL's 99th percentile over all streams, the median of
rounds of the two times' quotient. Client, router and worker share the machine's cores.

Exit status: 0; 1 when it cannot be measured and, with --check, when the quotient is above --limit;
2 for a wrong command line.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import uvloop
from rich.console import Console

from benchmarks.arguments import positive, positive_int
from benchmarks.logged_process import StartError
from benchmarks.report import print_line
from benchmarks.router_processes import running_router
from benchmarks.stats import host_info, median, percentile
from benchmarks.token_stamps import Nanoseconds, create_stamps
from benchmarks.token_times import Requests, TokenTimes
from benchmarks.token_ways import RoutedWay, WayError
from benchmarks.workloads import random_prompt

_PATIENCE_S = 30.0
"""How much longer than its pace a way may take, and how long a long prompt may."""

LongRequest = tuple[str, bytes]
"""A path and a body."""


@dataclass(slots=True)
class LongPromptReport:
    """The ITL's 99th percentiles in ms, one entry per round; `sent` long prompts in all."""

    quiet: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    sent: int = 0

    @property
    def quotient(self) -> float:
        """Beside long prompts over quiet, the median of rounds."""
        return median(b / q for b, q in zip(self.beside, self.quiet, strict=True)) or 0.0

    def line(self) -> str:
        """What was found, for a person."""
        quiet, beside = median(self.quiet) or 0.0, median(self.beside) or 0.0
        rounds = ", ".join(f"{b / q:.2f}" for b, q in zip(self.beside, self.quiet, strict=True))
        return (
            f"ITL p99: {quiet:.1f} ms quiet, {beside:.1f} ms beside {self.sent} long prompts; "
            f"{self.quotient:.2f} times (rounds: {rounds})"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    out, status = Console(width=110), Console(stderr=True)
    try:
        report = uvloop.run(measure(args, status))
    except (StartError, WayError) as error:
        print_line(status, f"cannot measure: {error}", style="red")
        return 1
    except KeyboardInterrupt:
        status.print("interrupted")
        return 130
    print_line(out, report.line())
    if args.json:
        found = {
            "benchmark": "long_prompts",
            "host": host_info(),
            "streams": args.streams,
            "characters": args.characters,
            "every_s": args.every,
            "quotient": report.quotient,
            "rounds": {"quiet_itl_p99_ms": report.quiet, "beside_itl_p99_ms": report.beside},
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.check and report.quotient > args.limit:
        text = f"missed: {report.quotient:.2f} times the quiet ITL, the target is {args.limit:g}"
        print_line(out, text, style="red")
        return 1
    if args.check:
        print_line(out, "check passed", style="green")
    return 0


async def measure(args: argparse.Namespace, status: Console) -> LongPromptReport:
    """Start worker and router, and take the streams quiet and beside long prompts, in turns.

    Raises:
        StartError, WayError: a process does not come up, or an answer is not what it should be.
    """
    requests, report = long_requests(args.characters), LongPromptReport()
    with tempfile.TemporaryDirectory(prefix="hexserve-") as name:
        folder = Path(name)
        rows = (2 * args.rounds + 1) * args.streams
        stamps = create_stamps(folder / "stamps.npy", rows, args.tokens)
        address = f"unix:{folder / 'worker.sock'}"
        async with running_router(folder, folder / "stamps.npy", address, 1 / args.rate) as url:
            run = Requests(stamps, args.tokens / args.rate + _PATIENCE_S)
            routed = RoutedWay(url)
            async with _arriving(url, requests, args.every):  # not counted
                await run(routed, args.streams)
            for number in range(args.rounds):
                print_line(status, f"round {number + 1}/{args.rounds}")
                report.quiet.append(itl_p99_ms(await run(routed, args.streams)))
                async with _arriving(url, requests, args.every) as sent:
                    report.beside.append(itl_p99_ms(await run(routed, args.streams)))
                report.sent += len(sent)
    return report


def long_requests(characters: int) -> list[LongRequest]:
    """The kinds of long prompts, each of about that many characters, none equal to another."""
    rng = random.Random(characters)
    texts = [random_prompt(rng, characters)[:characters] for _ in range(4)]
    ids = rng.choices(range(256), k=characters)
    completion = {"max_tokens": 1, "ignore_eos": True}
    chat = [{"role": "user", "content": texts[1]}]
    bodies = (
        ("/v1/completions", {**completion, "prompt": texts[0]}),
        ("/v1/chat/completions", {**completion, "messages": chat}),
        ("/v1/completions", {**completion, "prompt": ids}),
        ("/v1/completions", {**completion, "prompt": texts[2], "echo": True}),
        ("/v1/completions", {**completion, "prompt": ids[::-1], "echo": True}),
        ("/tokenize", {"prompt": texts[3], "return_token_strs": True}),
    )
    return [(path, json.dumps(body).encode()) for path, body in bodies]


@contextlib.asynccontextmanager
async def _arriving(
    url: str, requests: Sequence[LongRequest], every_s: float
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Long prompts arrive inside, on time whether or not those before are answered.

    Yields those that were sent. Raises WayError, at the end, for one that is not answered well.
    """
    asked: list[asyncio.Task[None]] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, trust_env=False, timeout=_PATIENCE_S, limits=limits
    ) as http:

        async def send_all() -> None:
            for path, body in itertools.cycle(requests):
                asked.append(asyncio.create_task(_ask(http, path, body)))
                await asyncio.sleep(every_s)

        sending = asyncio.create_task(send_all())
        try:
            yield asked
        finally:
            sending.cancel()
            await asyncio.gather(*asked)


async def _ask(http: httpx.AsyncClient, path: str, body: bytes) -> None:
    try:
        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        raise WayError(f"a long prompt to {path}: {error!r}") from error
    if answer.status_code != httpx.codes.OK:
        raise WayError(f"a long prompt to {path}: {answer.status_code} {answer.text[:300]}")


def itl_p99_ms(times: TokenTimes) -> float:
    """The gaps' 99th percentile while all streams were under way. Raises WayError: none were."""
    arrived = times.arrived
    begun, ended = arrived[:, 0].max(), arrived[:, -1].min()
    together = (arrived[:, :-1] >= begun) & (arrived[:, 1:] <= ended)
    gaps: Nanoseconds = np.diff(arrived, axis=1)[together]
    value = percentile(gaps.tolist(), 99)
    if value is None:
        raise WayError("the first stream has ended before the last has begun")
    return value / 1e6


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_prompts", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--streams", type=positive_int, default=64, help="streams at once; default 64")
    add("--tokens", type=positive_int, default=300, help="of each stream; default 300")
    add("--rate", type=positive, default=50.0, help="tokens/s of each stream; default 50")
    add("--characters", type=positive_int, default=100_000, help="of a prompt; default 100000")
    add("--every", type=positive, default=0.25, help="seconds between two; default 0.25")
    add("--rounds", type=positive_int, default=5, help="default 5")
    add("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    add("--check", action="store_true", help="exit 1 when the target is missed")
    add("--limit", type=positive, default=2.0, help="the target of --check; default 2")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
