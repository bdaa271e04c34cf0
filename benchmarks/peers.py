"""hexserve beside vLLM's CPU build and llama.cpp's server: the same weights, cores and workloads.

    python -m benchmarks.peers [--vllm COMMAND] [--llama COMMAND --llama_q8 FILE --llama_bf16 FILE]
                               [--workload w1,w2,w3,w4] [--rounds 3] [--json FILE] [--check]

All servers are started, and one at a time is given work. In each round a workload
(benchmarks/workloads.py) runs on one of them after the other, with fresh prompts, and beside
hexserve the machine is measured: a read of its memory, and the best matmul of the model's shapes
by torch (`pip install -e '.[bench]'`). What must keep a target is the median over the rounds of a
round's quotient. A peer that is not given is left out, with the targets that need it.

How the peers are installed is in the README, how they are set in benchmarks/peer_servers.py.

Exit status: 0; 1 when a server does not start or answers no request of a run and, with --check,
when any request failed or a target was missed; 2 for a wrong command line, or for --check without
torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from benchmarks.logged_process import StartError
from benchmarks.model_cost import model_cost
from benchmarks.openai_stream import ServerError
from benchmarks.peer_report import PeerReport
from benchmarks.peer_runs import run_rounds, servers_of
from benchmarks.peer_servers import (
    HEXSERVE,
    LLAMA_BF16,
    LLAMA_Q8,
    ServerCommand,
    hexserve_servers,
    llama_servers,
    running_servers,
    vllm_servers,
)
from benchmarks.process_tree import peak_memory
from benchmarks.report import print_line
from benchmarks.stats import host_info
from benchmarks.workloads import FULL, WORKLOADS
from checkpoint.demo import FOLDER_NAME
from checkpoint.errors import CheckpointError
from settings.environment import read_environment

_PIPE_WIDTH = 110


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    out = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    status = Console(stderr=True)
    commands = server_commands(args)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        report = _measure(args, commands, status)
    except (StartError, ServerError, CheckpointError) as error:
        print_line(status, f"cannot measure: {error}", style="red")
        return 1
    except KeyboardInterrupt:
        status.print("interrupted")
        return 130
    report.print(out)
    if args.json:
        settings = {
            "benchmark": "peers",
            "started": started,
            "host": host_info(),
            "seed": args.seed,
            "commands": {label: command.command for label, command in commands.items()},
            "shapes": {name: asdict(FULL[name]) for name in args.workload},
        }
        args.json.write_text(json.dumps(report.as_json(settings), indent=1) + "\n")
    return report.verdict(out, check=args.check)


def server_commands(args: argparse.Namespace) -> dict[str, ServerCommand]:
    """What is to be started for the chosen workloads, by label."""
    commands = hexserve_servers(args.model)
    if args.vllm:
        commands |= vllm_servers(args.vllm, args.model)
    files = {LLAMA_Q8: args.llama_q8, LLAMA_BF16: args.llama_bf16}
    if args.llama:
        commands |= llama_servers(args.llama, {name: file for name, file in files.items() if file})
    needed = servers_of(args.workload)
    return {label: command for label, command in commands.items() if label in needed}


def _measure(
    args: argparse.Namespace, commands: dict[str, ServerCommand], status: Console
) -> PeerReport:
    cost = model_cost(args.model)
    with tempfile.TemporaryDirectory() as folder:
        print_line(status, f"starting {'; '.join(commands)}")
        with running_servers(commands, Path(folder)) as servers:
            report = asyncio.run(
                run_rounds(
                    servers,
                    FULL,
                    dict.fromkeys(args.workload, args.rounds),
                    cost,
                    random.Random(args.seed),
                    lambda run: print_line(status, run),
                )
            )
            report.memory = {
                label: peak_memory(servers[label].process.pid)
                for label in HEXSERVE
                if label in servers
            }
    return report


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    demo = read_environment().cache / FOLDER_NAME
    parser.add_argument("--model", type=Path, default=demo, help="a folder; default: the demo's")
    parser.add_argument("--vllm", type=Path, metavar="COMMAND", help="bin/vllm of its environment")
    parser.add_argument("--llama", type=Path, metavar="COMMAND", help="llama-server")
    parser.add_argument("--llama_q8", type=Path, metavar="FILE", help="the model as q8_0 GGUF")
    parser.add_argument("--llama_bf16", type=Path, metavar="FILE", help="the model as bf16 GGUF")
    parser.add_argument("--workload", default="all", help="comma-separated, or all (default)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="of the prompts; default: a random one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    names = WORKLOADS if args.workload == "all" else tuple(args.workload.split(","))
    if unknown := sorted(set(names) - set(WORKLOADS)):
        parser.error(f"unknown workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    args.workload = list(dict.fromkeys(names))
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} is not at least 1")
    if not args.model.is_dir():
        parser.error(f"--model {args.model}: no such folder (`make demo` fetches the demo model)")
    for flag in ("vllm", "llama", "llama_q8", "llama_bf16"):
        path = getattr(args, flag)
        if path and not path.is_file():
            parser.error(f"--{flag} {path}: no such file")
    if bool(args.llama) != bool(args.llama_q8 or args.llama_bf16):
        parser.error("--llama and one of --llama_q8, --llama_bf16 go together")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: no such folder")
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed: one for each role of 1,1")
    if args.check and not find_spec("torch"):
        parser.error("--check needs torch: pip install -e '.[bench]'")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(2**32)
    return args


if __name__ == "__main__":
    sys.exit(main())
