"""The CPU kernels beside what limits them, and beside the reference kernels.

    python -m benchmarks.kernels [--cores 1,2] [--only TEXT] [--rounds 7] [--json FILE] [--check]

Each kernel runs in turn with its floor: one read of as many bytes as it must read, a memcpy of
as many bytes as it copies, or the same matmul by torch (`pip install -e '.[bench]'`; without
torch by XLA). A share is the median of the rounds' ratios of the two times: 1.00 is as fast as
the floor; one below its target takes three times as many rounds more. "x reference" is how many
times faster than the reference the kernel is.

Each number of cores is measured in a process of its own that may use no others.

Exit status: 0; with --check, 1 when a share is below its target; 2 for a wrong command line, or
for --check without torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.report import print_line
from benchmarks.stats import host_info, median, ratio

_PIPE_WIDTH = 130
MORE_ROUNDS = 3
"""Times as many rounds follow where a share is below its target, before it counts as missed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One case on one number of cores; speeds in GB/s or GFLOP/s."""

    cores: int
    name: str
    dtype: str
    floor: str
    speed: float
    floor_speed: float
    share: float
    times_reference: float | None
    target: float | None

    def missed(self) -> str | None:
        """Why this misses its target; None when it keeps it."""
        if self.target is None or self.share >= self.target:
            return None
        return (
            f"{self.name} {self.dtype} on {self.cores} cores: {self.share:.2f} of "
            f"{self.floor}, target {self.target:.2f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    out = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    usable = sorted(os.sched_getaffinity(0))
    library = "torch" if find_spec("torch") else "XLA, float32"
    if args.check and library != "torch":
        print_line(out, "--check needs torch: pip install -e '.[bench]'", style="red")
        return 2
    results: list[Measured] = []
    for count in args.cores:
        if count > len(usable):
            print_line(out, f"{count} cores are not there, {len(usable)} are", style="red")
            return 2
        with multiprocessing.get_context("spawn").Pool(1, _pin, (usable[:count],)) as child:
            measured = child.apply(measure, (count, args.only, args.rounds))
        out.print(_table(measured, count, library))
        results += measured
    if args.json:
        figures = {
            "host": host_info(),
            "matmul": library,
            "kernels": [asdict(each) for each in results],
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if not args.check:
        return 0
    missed = [line for each in results if (line := each.missed())]
    for line in missed:
        print_line(out, f"missed: {line}", style="red")
    if not missed:
        print_line(out, "check passed", style="green")
    return 1 if missed else 0


def measure(cores: int, only: str, rounds: int) -> list[Measured]:
    """Every case whose name holds `only`, in this process."""
    from benchmarks.kernel_cases import Case, every_case

    def one(case: Case) -> Measured:
        kernel, floor, shares, gains = [], [], [], []
        left = rounds
        while left:
            kernel.append(case.kernel())
            floor.append(case.baseline())
            shares.append(floor[-1] / kernel[-1])
            left -= 1
            below = case.target is not None and (median(shares) or 0.0) < case.target
            if not left and below and len(shares) == rounds:
                left = MORE_ROUNDS * rounds
        # The reference is slow, and only shown.
        for index in range(min(rounds, 2) if case.reference else 0):
            assert case.reference is not None
            gains.append(ratio(case.reference(), kernel[index]))
        speed, floor_speed = (case.amount / (median(s) or 1) / 1e9 for s in (kernel, floor))
        return Measured(
            cores, case.name, case.dtype, case.floor, speed, floor_speed,
            median(shares) or 0.0, median(gains), case.target,
        )  # fmt: skip

    return [one(case) for case in every_case(cores, only)]


def _pin(cores: list[int]) -> None:
    """Before jax counts the cores to make its thread pool."""
    os.sched_setaffinity(0, cores)


def _table(results: list[Measured], cores: int, library: str) -> Table:
    title = f"kernels on {cores} core{'s' * (cores > 1)}"
    table = Table(title=title, caption=f"matmul: {library}")
    for title in ("kernel", "dtype"):
        table.add_column(title)
    for title in ("speed", "floor", "share", "target", "x reference"):
        table.add_column(title, justify="right")
    for each in results:
        unit = "GFLOP/s" if each.floor == "matmul" else "GB/s"
        style = "red" if each.missed() else None
        table.add_row(
            each.name,
            each.dtype,
            f"{each.speed:.1f} {unit}",
            f"{each.floor} {each.floor_speed:.1f}",
            f"{each.share:.2f}",
            "-" if each.target is None else f"{each.target:.2f}",
            "-" if each.times_reference is None else f"{each.times_reference:.1f}",
            style=style,
        )
    return table


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cores", type=_counts, default=(1, 2), help="such as 1,2")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(argv)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least one core is wanted")
    return counts


if __name__ == "__main__":
    sys.exit(main())
