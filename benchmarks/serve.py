"""Serving benchmark for any OpenAI-compatible server, or two of them side by side.

    python -m benchmarks.serve --url http://127.0.0.1:8000
    python -m benchmarks.serve --url A_URL --url B_URL --rounds 5 --json result.json \\
        --target 'w2.output_tok_s>=1.3' --target 'w1.tpot_p50_ms<=1.0'

The workloads are described in benchmarks/workloads.py. Given two servers, each round
runs a workload on the first and then on the second, with fresh prompts, and the ratios
are the median over rounds of first / second. The two servers should not compute
anything else meanwhile.

A target is WORKLOAD.FIGURE, one of >= <= > <, and a number; it speaks about the figure
of one server or the ratio of two. The figures are listed by --help. Exit status: 0; 1
when a server cannot be measured (no answer, or no request of a workload succeeds) and,
with --check or a --target, when any request failed or a target was missed; 2 for a wrong
command line.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arguments import positive_int
from benchmarks.openai_stream import OpenAIStreamClient, ServerError
from benchmarks.report import FIGURES, Report, Server, print_line
from benchmarks.stats import host_info
from benchmarks.targets import Target
from benchmarks.workloads import FULL, QUICK, WORKLOADS, Shapes, random_prompt, run_workload

_WARMUP_PROMPT = 64
_WARMUP_OUTPUT = 16
_PIPE_WIDTH = 110


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    out = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    status = Console(stderr=True)
    shapes = QUICK if args.quick else FULL
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        report = asyncio.run(measure(args, shapes, status))
    except ServerError as error:
        print_line(status, f"cannot measure {error}", style="red")
        return 1
    except KeyboardInterrupt:
        status.print("interrupted")
        return 130
    report.print(out)
    if args.json:
        settings = {
            "benchmark": "serve",
            "started": started,
            "host": host_info(),
            "api": args.api,
            "seed": args.seed,
            "rounds": args.rounds,
            "quick": args.quick,
            "ignore_eos": args.ignore_eos,
            "extra": args.extra,
            "shapes": {name: asdict(shapes[name]) for name in args.workload},
        }
        args.json.write_text(json.dumps(report.as_json(settings), indent=1) + "\n")
    return _verdict(args, report, out)


async def measure(args: argparse.Namespace, shapes: Shapes, status: Console) -> Report:
    """Run the chosen workloads on every server, round by round."""
    rng = random.Random(args.seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=args.timeout, limits=limits, trust_env=False) as http:
        clients = [
            OpenAIStreamClient(
                http,
                url,
                model=model or "",
                api=args.api,
                ignore_eos=args.ignore_eos,
                extra=args.extra,
            )
            for url, model in zip(args.url, args.model, strict=True)
        ]
        for client in clients:
            await warm_up(client, rng)
        report = Report(
            [
                Server(label, client.base_url, client.model)
                for label, client in zip(args.label, clients, strict=True)
            ]
        )
        with _progress(status) as progress:
            for workload in args.workload:
                await _run_rounds(workload, args.rounds, clients, shapes, rng, report, progress)
    return report


async def warm_up(client: OpenAIStreamClient, rng: random.Random) -> None:
    """Find the model's name if need be and send one request that is not counted."""
    if not client.model:
        await client.discover_model()
    body = client.encode(random_prompt(rng, _WARMUP_PROMPT), _WARMUP_OUTPUT)
    timing = await client.send(body, _WARMUP_OUTPUT)
    if timing.error:
        raise ServerError(f"{client.base_url}: {timing.error}")


async def _run_rounds(
    workload: str,
    rounds: int,
    clients: list[OpenAIStreamClient],
    shapes: Shapes,
    rng: random.Random,
    report: Report,
    progress: Progress,
) -> None:
    """Alternate between the servers; a run without any success ends the workload."""
    shape = shapes[workload]
    task = progress.add_task(workload, total=rounds * len(clients) * shape.ticks)
    for number in range(1, rounds + 1):
        results = []
        for index, client in enumerate(clients):
            title = f"{workload} {report.servers[index].label} {number}/{rounds}"
            progress.update(task, description=title)
            if not progress.console.is_terminal:
                print_line(progress.console, title)
            result = await run_workload(client, shape, rng, lambda: progress.advance(task))
            report.add(workload, index, result)
            results.append(result)
        if any(result.failed for result in results):
            break
    progress.update(task, description=workload)


def _progress(console: Console) -> Progress:
    """A bar on a terminal, no bar elsewhere; redrawn seldom, to leave the cores alone."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=2,
        transient=True,
    )


def _verdict(args: argparse.Namespace, report: Report, out: Console) -> int:
    """The exit status, after printing every missed target."""
    status = 1 if report.failed_workloads else 0
    if args.check:
        missed = report.missed(args.target)
        for line in missed:
            print_line(out, f"missed target {line}", style="red")
        if missed or report.errors:
            status = 1
        elif status == 0:
            out.print(f"check passed: no failed request, {len(args.target)} targets kept")
    return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"workloads: {', '.join(WORKLOADS)}; figures for --target: {', '.join(FIGURES)}",
    )
    parser.add_argument(
        "--url", action="append", required=True, help="server, given twice to compare two"
    )
    parser.add_argument(
        "--model",
        action="append",
        help="model name, once for all servers or once each; default: the first of /v1/models",
    )
    parser.add_argument(
        "--label", action="append", help="the server's name in the results, once for each --url"
    )
    parser.add_argument("--workload", default="all", help="comma-separated, or all (default)")
    parser.add_argument("--rounds", type=positive_int, default=1, help="default 1")
    parser.add_argument("--api", choices=("completions", "chat"), default="completions")
    parser.add_argument("--seed", type=int, help="seed of the prompts; default: a random one")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, for a smoke test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 when a request failed or a target is missed"
    )
    parser.add_argument(
        "--target",
        action="append",
        type=_target,
        default=[],
        metavar="BOUND",
        help="such as 'w2.output_tok_s>=1.3', repeatable; implies --check",
    )
    parser.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="for servers that refuse the ignore_eos field",
    )
    parser.add_argument(
        "--extra", type=_json_object, default={}, help="JSON object merged into every request"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds without a byte; default 600"
    )
    args = parser.parse_args(argv)
    _complete(parser, args)
    return args


def _complete(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check what argparse cannot and fill in what follows from other options."""
    if len(args.url) > 2:
        parser.error("--url can be given twice at most")
    for url in args.url:
        if not url.startswith(("http://", "https://")):
            parser.error(f"--url {url!r} must start with http:// or https://")
    models = args.model or [None]
    if len(models) == 1:
        models = models * len(args.url)
    if len(models) != len(args.url):
        parser.error("--model must be given once, or once for each --url")
    args.model = models
    args.label = args.label or (["A", "B"] if len(args.url) == 2 else list(args.url))
    if len(args.label) != len(args.url) or len(set(args.label)) != len(args.label):
        parser.error("--label must be given once for each --url, with different names")
    names = WORKLOADS if args.workload == "all" else tuple(args.workload.split(","))
    if unknown := sorted(set(names) - set(WORKLOADS)):
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    args.workload = list(dict.fromkeys(names))
    for target in args.target:
        if target.figure not in FIGURES:
            parser.error(f"target {target}: no figure {target.figure!r}; see --help")
        if target.workload not in args.workload:
            parser.error(f"target {target}: workload {target.workload!r} is not run")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: no such folder")
    args.check = args.check or bool(args.target)
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(2**32)


def _target(text: str) -> Target:
    try:
        return Target.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


if __name__ == "__main__":
    sys.exit(main())
