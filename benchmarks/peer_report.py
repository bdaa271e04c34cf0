"""What benchmarks.peers found: figures, targets, peak memory; as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peer_targets import MACHINE, Round, judge, left_out
from benchmarks.report import number, print_line, round_json
from benchmarks.stats import median
from benchmarks.workloads import Figures, WorkloadResult

_COLUMNS = {
    "ttft_p50_ms": "TTFT p50 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "output_tok_s": "output tok/s",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
    "itl_quiet_p50_ms": "quiet p50 ms",
    "itl_quiet_p99_ms": "quiet p99 ms",
}
_MACHINE_FIGURES = {
    "read_all_ms": "reading w1's step on all cores",
    "read_half_ms": "on half",
    "matmul_all_ms": "w3's operations by the best matmul on all cores",
    "matmul_half_ms": "on half",
}
_SHOWN_ERRORS = 5


@dataclass(slots=True)
class PeerReport:
    """All rounds, by workload.

    Attributes:
        memory: server → (program, most bytes it had in memory) of each of its processes.
    """

    results: dict[str, list[dict[str, WorkloadResult]]] = field(default_factory=dict)
    machine: dict[str, list[Figures]] = field(default_factory=dict)
    memory: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def add(self, workload: str, results: Mapping[str, WorkloadResult], machine: Figures) -> None:
        """Keep one more round: contender → result, and the machine's figures if it has any."""
        self.results.setdefault(workload, []).append(dict(results))
        self.machine.setdefault(workload, []).append(machine)

    @property
    def rounds(self) -> dict[str, list[Round]]:
        """The figures alone, the machine among the contenders."""
        return {
            workload: [
                {name: result.figures for name, result in results.items()}
                | ({MACHINE: machine} if machine else {})
                for results, machine in zip(rounds, self.machine[workload], strict=True)
            ]
            for workload, rounds in self.results.items()
        }

    def medians(self, workload: str, contender: str) -> Figures:
        """Each figure's median over the rounds."""
        rounds = [each[contender] for each in self.rounds[workload]]
        return {name: median(each.get(name) for each in rounds) for name in rounds[0]}

    @property
    def errors(self) -> list[str]:
        """Every failed request's message, naming workload and contender."""
        return [
            f"{workload} on {name}: {error}"
            for workload, rounds in self.results.items()
            for results in rounds
            for name, result in results.items()
            for error in result.errors
        ]

    @property
    def missed(self) -> list[str]:
        """One line for every target that is not kept."""
        return [
            f"{each.goal.name}: {_value(each.value)}"
            for each in judge(self.rounds)
            if not each.kept
        ]

    @property
    def unanswered(self) -> list[str]:
        """Workload and contender of every run in which no request succeeded."""
        return [
            f"{workload} on {name}"
            for workload, rounds in self.results.items()
            for results in rounds
            for name, result in results.items()
            if result.failed
        ]

    def print(self, console: Console) -> None:
        """The tables, then what a reader must know of them."""
        for workload in self.results:
            console.print(self._figures_table(workload))
        console.print(self._targets_table())
        if self.memory:
            console.print(self._memory_table())
        for goal in left_out(self.rounds):
            print_line(console, f"left out: {goal.name}")
        for line in self._notes():
            print_line(console, f"note: {line}")
        errors = list(dict.fromkeys(self.errors))
        for line in errors[:_SHOWN_ERRORS]:
            print_line(console, f"error: {line}", style="red")
        if len(errors) > _SHOWN_ERRORS:
            print_line(console, f"{len(errors)} kinds of errors in all", style="red")

    def verdict(self, console: Console, *, check: bool) -> int:
        """The exit status, after naming every run without an answer and every missed target."""
        for line in self.unanswered:
            print_line(console, f"no request succeeded: {line}", style="red")
        if not check:
            return 1 if self.unanswered else 0
        for line in self.missed:
            print_line(console, f"missed target {line}", style="red")
        if self.missed or self.errors or self.unanswered:
            return 1
        print_line(console, "check passed", style="green")
        return 0

    def as_json(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings, medians, raw rounds, targets and memory."""
        return {
            **settings,
            "workloads": {
                workload: {
                    "medians": {name: self.medians(workload, name) for name in rounds[0]},
                    "machine": self.machine[workload],
                    "rounds": [
                        {name: round_json(result) for name, result in results.items()}
                        for results in rounds
                    ],
                }
                for workload, rounds in self.results.items()
            },
            "targets": [
                {"target": each.goal.name, "measured": each.value, "kept": each.kept}
                for each in judge(self.rounds)
            ],
            "left_out": [goal.name for goal in left_out(self.rounds)],
            "peak_memory": self.memory,
        }

    def _figures_table(self, workload: str) -> Table:
        names = list(self.results[workload][0])
        rows = {name: self.medians(workload, name) for name in names}
        columns = [
            key for key in _COLUMNS if any(row.get(key) is not None for row in rows.values())
        ]
        count = len(self.results[workload])
        table = Table(title=f"{workload}, medians of {count} round{'s' * (count > 1)}")
        table.add_column("server")
        for key in columns:
            table.add_column(_COLUMNS[key], justify="right")
        table.add_column("errors", justify="right")
        for name, row in rows.items():
            errors = sum(len(results[name].errors) for results in self.results[workload])
            table.add_row(name, *(number(row.get(key)) for key in columns), str(errors))
        if self.machine[workload][0]:
            floors = self.medians(workload, MACHINE)
            table.caption = ", ".join(
                f"{title} {number(floors[key])} ms" for key, title in _MACHINE_FIGURES.items()
            )
        return table

    def _targets_table(self) -> Table:
        table = Table(title="targets")
        table.add_column("target")
        table.add_column("measured", justify="right")
        table.add_column("")
        for each in judge(self.rounds):
            style = None if each.kept else "red"
            kept = "kept" if each.kept else "MISSED"
            table.add_row(each.goal.name, _value(each.value), kept, style=style)
        return table

    def _memory_table(self) -> Table:
        table = Table(title="peak memory of hexserve's processes")
        table.add_column("server")
        table.add_column("process")
        table.add_column("MiB", justify="right")
        for label, processes in self.memory.items():
            for program, nbytes in processes:
                table.add_row(label, program, number(nbytes / 2**20, digits=0))
        return table

    def _notes(self) -> Sequence[str]:
        return list(
            dict.fromkeys(
                f"{workload} on {name}: {note}"
                for workload, rounds in self.results.items()
                for results in rounds
                for name, result in results.items()
                for note in result.notes
            )
        )


def _value(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
