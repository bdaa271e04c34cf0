"""How long a deployment takes from its command to ready.

    python -m benchmarks.start [--model demo] [--disagg_topo 1,1] [--runs 3] [--json FILE] [--check]

The first start may compile, or even fetch the model: it is shown apart. The others find the
compile cache warm. With --check, exit status 1 when their median is --limit-s or more, or when
a deployment does not start.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.logged_process import StartError, running_module
from benchmarks.report import print_line
from benchmarks.stats import host_info, median

_FIRST_START_S = 900.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    status = Console(stderr=True)
    try:
        seconds = []
        for run in range(1 + args.runs):
            print_line(status, f"start {run + 1} of {1 + args.runs}")
            seconds.append(_start_once(args.model, args.disagg_topo))
    except StartError as error:
        print_line(status, str(error), style="red")
        return 1
    warm = median(seconds[1:])
    assert warm is not None
    table = Table("start", "seconds to ready", title=f"{args.model}, {args.disagg_topo}")
    table.add_row("first", f"{seconds[0]:.1f}")
    table.add_row("warm, median", f"{warm:.1f}")
    table.add_row("warm, all", ", ".join(f"{s:.1f}" for s in seconds[1:]))
    Console().print(table)
    if args.json:
        figures = {"host": host_info(), "first_s": seconds[0], "warm_s": seconds[1:]}
        args.json.write_text(json.dumps(figures, indent=2))
    if args.check and warm >= args.limit_s:
        print_line(status, f"missed: warm start {warm:.1f} s, target under {args.limit_s:g} s")
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.start", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="demo")
    parser.add_argument("--disagg_topo", default="1,1")
    parser.add_argument("--runs", type=int, default=3, help="warm starts")
    parser.add_argument("--limit-s", type=float, default=8.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(argv)


def _start_once(model: str, topology: str) -> float:
    """Seconds from the command to the line that says ready."""
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_module(
            Path(folder) / "serve.log",
            "hex_llm.server.api_server",
            "--host=127.0.0.1",
            "--port=0",
            f"--model={model}",
            f"--disagg_topo={topology}",
        ) as server,
    ):
        server.wait_for("ready at http", began + _FIRST_START_S)
        return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
