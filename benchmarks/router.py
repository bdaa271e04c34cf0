"""What the router adds to a token's way from a worker to a client, and how many it can send.

    python -m benchmarks.router [--streams 32] [--busy-streams 256] [--rounds 5] [--check]

A worker without an engine sends tokens at a fixed pace and notes when; see
benchmarks/paced_worker.py. Each round takes them once over a bare session with the worker
and once over HTTP by way of `python -m router --model fake`, for one stream and then for
many at once. A token's way ends when the client has the message, or the whole event, that
carries it. What the router adds is the difference of the two ways' medians over all tokens;
figures are medians over rounds.

The streams of a round are steps of one batch, as a real worker's are: all tokens of a step
reach the router in one message, and its last event waits for the others. Client, router and
worker share the machine, so on few cores they wait for each other, and that counts as well.

Then --busy-streams are sent as fast as one core's router takes them, see
benchmarks/router_speed.py; a share of a bare ASGI application's tokens/s is what it gives.

Exit status: 0; 1 when a way cannot be measured and, with --check, when a target is missed: the
router adds --limit-ms or more at the median of either load, gives less than --least-share of
the bare application's rate, or adds --busy-limit-ms or more at the 99th percentile at half of
its own; 2 for a wrong command line.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arguments import positive, positive_int
from benchmarks.logged_process import StartError
from benchmarks.report import print_line
from benchmarks.router_processes import running_router
from benchmarks.router_report import RouterReport, round_figures, streams_name
from benchmarks.router_speed import SpeedSize, measure_speed
from benchmarks.stats import host_info
from benchmarks.token_stamps import MAX_REQUESTS, create_stamps
from benchmarks.token_times import Requests
from benchmarks.token_ways import DirectWay, RoutedWay, WayError

_PIPE_WIDTH = 110
_PATIENCE_S = 30.0
"""How much longer than its pace a way may take."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    out = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    status = Console(stderr=True)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        report = uvloop.run(measure(args, status))
        size = SpeedSize(args.busy_streams, args.busy_tokens, args.rounds)
        speed = uvloop.run(measure_speed(size, lambda line: print_line(status, line)))
    except (StartError, WayError) as error:
        print_line(status, f"cannot measure: {error}", style="red")
        return 1
    except KeyboardInterrupt:
        status.print("interrupted")
        return 130
    report.print(out)
    for line in speed.lines():
        print_line(out, line)
    if args.json:
        settings = {
            "benchmark": "router",
            "started": started,
            "host": host_info(),
            "tokens": args.tokens,
            "rate": args.rate,
            "busy_streams": args.busy_streams,
            "busy_tokens": args.busy_tokens,
        }
        found = {**report.as_json(settings), "busy": speed.as_json()}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if not args.check:
        return 0
    missed = report.missed(args.limit_ms) + speed.missed(args.least_share, args.busy_limit_ms)
    for line in missed:
        print_line(out, f"missed: {line}", style="red")
    if not missed:
        print_line(out, "check passed", style="green")
    return 1 if missed else 0


async def measure(args: argparse.Namespace, status: Console) -> RouterReport:
    """Start worker and router, and take both ways for every load, round by round.

    Raises:
        StartError, WayError: a process does not come up, or tokens do not come through.
    """
    loads = sorted({1, args.streams})
    report = RouterReport()
    with tempfile.TemporaryDirectory(prefix="hexserve-") as name:
        folder = Path(name)
        stamps = create_stamps(folder / "stamps.npy", _requests(args), args.tokens)
        address = f"unix:{folder / 'worker.sock'}"
        async with running_router(folder, folder / "stamps.npy", address, 1 / args.rate) as url:
            run = Requests(stamps, args.tokens / args.rate + _PATIENCE_S)
            direct, routed = DirectWay(address), RoutedWay(url)
            with _progress(status) as progress:
                task = progress.add_task("", total=len(loads) * args.rounds)
                for way in (direct, routed):  # not counted
                    await run(way, args.streams)
                for number, streams in itertools.product(range(args.rounds), loads):
                    title = f"{streams_name(streams)}, round {number + 1}/{args.rounds}"
                    progress.update(task, description=title)
                    if not status.is_terminal:
                        print_line(status, title)
                    first = (await run(direct, streams)).on_the_way
                    second = (await run(routed, streams)).on_the_way
                    report.add(streams, round_figures(first, second))
                    progress.advance(task)
    return report


def _requests(args: argparse.Namespace) -> int:
    """How many requests a measurement makes, over both ways and with those not counted."""
    loads: set[int] = {1, args.streams}
    return int(2 * (args.streams + args.rounds * sum(loads)))


def _progress(status: Console) -> Progress:
    """A bar on a terminal, no bar elsewhere; redrawn seldom, to leave the cores alone."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=status,
        disable=not status.is_terminal,
        refresh_per_second=2,
        transient=True,
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--streams", type=positive_int, help="streams at once, beside a single one; default 32"
    )
    parser.add_argument("--tokens", type=positive_int, help="of each stream; default 100")
    parser.add_argument("--rounds", type=positive_int, help="default 5")
    parser.add_argument(
        "--rate", type=positive, default=50.0, help="tokens/s of each stream; default 50"
    )
    parser.add_argument(
        "--busy-streams", type=positive_int, help="streams that saturate the router; default 256"
    )
    parser.add_argument(
        "--busy-tokens", type=positive_int, help="of each of these streams; default 400"
    )
    parser.add_argument("--quick", action="store_true", help="smaller defaults, for a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 when the target is missed")
    parser.add_argument(
        "--limit-ms", type=positive, default=2.0, help="a target of --check; default 2"
    )
    parser.add_argument(
        "--least-share", type=positive, default=0.5, help="a target of --check; default 0.5"
    )
    parser.add_argument(
        "--busy-limit-ms", type=positive, default=20.0, help="a target of --check; default 20"
    )
    args = parser.parse_args(argv)
    defaults = (
        ("streams", 4, 32),
        ("tokens", 25, 100),
        ("rounds", 1, 5),
        ("busy_streams", 8, 256),
        ("busy_tokens", 300, 400),
    )
    for name, quick, full in defaults:
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    if _requests(args) > MAX_REQUESTS:
        parser.error(f"--streams and --rounds make more than {MAX_REQUESTS} requests")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: no such folder")
    return args


if __name__ == "__main__":
    sys.exit(main())
