"""What a serving benchmark run found: medians, ratios, tables and the JSON file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.openai_stream import RequestTiming
from benchmarks.stats import median, milliseconds, ratio
from benchmarks.targets import Target
from benchmarks.workloads import Figures, WorkloadResult

FIGURES: dict[str, str] = {
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "tpot_p50_ms": "TPOT p50 ms",
    "tpot_p99_ms": "TPOT p99 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
    "itl_max_ms": "ITL max ms",
    "itl_quiet_p50_ms": "quiet ITL p50 ms",
    "itl_quiet_p99_ms": "quiet ITL p99 ms",
    "output_tok_s": "output tok/s",
    "prefill_tok_s": "prefill tok/s",
}
"""Every figure a workload may have and its title, in the order of the tables."""

_SUMMARY_COLUMNS: dict[str, tuple[str, ...]] = {
    "TTFT ms": ("ttft_p50_ms", "ttft_p99_ms"),
    "TPOT ms": ("tpot_p50_ms", "tpot_p99_ms"),
    "ITL ms": ("itl_p50_ms", "itl_p99_ms"),
    "output tok/s": ("output_tok_s",),
    "prefill tok/s": ("prefill_tok_s",),
}
_SHOWN_MESSAGES = 3


@dataclass(frozen=True, slots=True)
class Server:
    """One server under test, by the label it has in tables and files."""

    label: str
    url: str
    model: str


@dataclass(slots=True)
class Report:
    """All runs, by workload and by server, round by round."""

    servers: list[Server]
    results: dict[str, list[list[WorkloadResult]]] = field(default_factory=dict)
    """Workload to one list for every server, of one result for every round."""

    def add(self, workload: str, server: int, result: WorkloadResult) -> None:
        """Keep the result of one more round."""
        if workload not in self.results:
            self.results[workload] = [[] for _ in self.servers]
        self.results[workload][server].append(result)

    @property
    def compares(self) -> bool:
        """Two servers are under test."""
        return len(self.servers) == 2

    def medians(self, workload: str, server: int) -> Figures:
        """Each figure's median over the rounds."""
        rounds = self.results[workload][server]
        names = [name for name in FIGURES if any(name in result.figures for result in rounds)]
        return {name: median(result.figures.get(name) for result in rounds) for name in names}

    def round_ratios(self, workload: str) -> dict[str, list[float]]:
        """First server over second, for each figure in every round where both have it."""
        ratios: dict[str, list[float]] = {}
        for name in self.medians(workload, 0):
            ratios[name] = [
                quotient
                for first, second in zip(*self.results[workload], strict=False)
                if (quotient := ratio(first.figures.get(name), second.figures.get(name)))
                is not None
            ]
        return ratios

    def ratios(self, workload: str) -> Figures:
        """The median of the rounds' ratios.

        The two runs of a round are neighbours in time, so their ratio survives a
        machine whose speed drifts between rounds; a ratio of medians would not.
        """
        return {name: median(values) for name, values in self.round_ratios(workload).items()}

    @property
    def errors(self) -> list[str]:
        """Every failed request's message, naming workload and server."""
        return [
            f"{workload} on {server.label}: {error}"
            for workload, by_server in self.results.items()
            for server, rounds in zip(self.servers, by_server, strict=True)
            for result in rounds
            for error in result.errors
        ]

    @property
    def failed_workloads(self) -> list[str]:
        """Workload and server of every run in which no request succeeded."""
        return [
            f"{workload} on {server.label}"
            for workload, by_server in self.results.items()
            for server, rounds in zip(self.servers, by_server, strict=True)
            if any(result.failed for result in rounds)
        ]

    def missed(self, targets: list[Target]) -> list[str]:
        """One line for every target that is not kept."""
        figures = {
            workload: self.ratios(workload) if self.compares else self.medians(workload, 0)
            for workload in self.results
        }
        return [line for target in targets if (line := target.missed(figures))]

    def print(self, console: Console) -> None:
        """Print the tables, then notes and errors."""
        if self.compares:
            for workload in self.results:
                console.print(self._comparison_table(workload))
        else:
            console.print(self._summary_table())
            self._print_extras(console)
        self._print_notes(console)
        self._print_errors(console)

    def _error_count(self, workload: str, server: int) -> int:
        return sum(len(result.errors) for result in self.results[workload][server])

    def _summary_table(self) -> Table:
        rounds = max((len(by_server[0]) for by_server in self.results.values()), default=0)
        caption = "latencies are p50 / p99" + (f", medians of {rounds} rounds" * (rounds > 1))
        table = Table(title=escape(self.servers[0].label), caption=caption)
        table.add_column("workload")
        for title in (*_SUMMARY_COLUMNS, "errors"):
            table.add_column(title, justify="right")
        for workload in self.results:
            figures = self.medians(workload, 0)
            cells = [
                " / ".join(number(figures.get(name)) for name in names)
                for names in _SUMMARY_COLUMNS.values()
            ]
            table.add_row(workload, *cells, _count(self._error_count(workload, 0)))
        return table

    def _print_extras(self, console: Console) -> None:
        """Print the figures that only some workloads have and the summary leaves out."""
        summarized = {name for names in _SUMMARY_COLUMNS.values() for name in names}
        for workload in self.results:
            extras = [
                f"{FIGURES[name]} {number(value)}"
                for name, value in self.medians(workload, 0).items()
                if name not in summarized
            ]
            if extras:
                print_line(console, f"{workload}: {', '.join(extras)}")

    def _comparison_table(self, workload: str) -> Table:
        first, second = (escape(server.label) for server in self.servers)
        rounds = min(len(results) for results in self.results[workload])
        plural = "s" * (rounds > 1)
        table = Table(title=f"{workload}, medians of {rounds} round{plural}", min_width=60)
        table.add_column("figure")
        for title in (first, second, f"{first}/{second}", "rounds' range"):
            table.add_column(title, justify="right")
        medians = [self.medians(workload, server) for server in (0, 1)]
        ratios = self.ratios(workload)
        for name, quotients in self.round_ratios(workload).items():
            values = [figures.get(name) for figures in medians]
            if values == [None, None]:
                continue
            spread = f"{min(quotients):.3f} .. {max(quotients):.3f}" if quotients else "-"
            table.add_row(
                FIGURES[name], *map(number, values), number(ratios[name], digits=3), spread
            )
        table.add_row("errors", *(_count(self._error_count(workload, index)) for index in (0, 1)))
        return table

    def _print_notes(self, console: Console) -> None:
        for workload, by_server in self.results.items():
            for server, rounds in zip(self.servers, by_server, strict=True):
                for note in dict.fromkeys(note for result in rounds for note in result.notes):
                    print_line(console, f"note: {workload} on {server.label}: {note}")

    def _print_errors(self, console: Console) -> None:
        errors = self.errors
        for line in [f"FAILED: {name}: no request succeeded" for name in self.failed_workloads] + [
            f"error: {message}" for message in list(dict.fromkeys(errors))[:_SHOWN_MESSAGES]
        ]:
            print_line(console, line, style="red")
        if len(errors) > _SHOWN_MESSAGES:
            print_line(console, f"{len(errors)} requests failed in all", style="red")

    def as_json(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Everything for the JSON file: settings, medians, ratios and raw rounds."""
        workloads: dict[str, Any] = {}
        for workload, by_server in self.results.items():
            entry: dict[str, Any] = {
                "servers": {
                    server.label: {
                        "median": self.medians(workload, index),
                        "rounds": [round_json(result) for result in by_server[index]],
                    }
                    for index, server in enumerate(self.servers)
                }
            }
            if self.compares:
                entry["ratio"] = self.ratios(workload)
                entry["round_ratios"] = self.round_ratios(workload)
            workloads[workload] = entry
        servers = [
            {"label": server.label, "url": server.url, "model": server.model}
            for server in self.servers
        ]
        return {**settings, "servers": servers, "workloads": workloads}


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Print text as it is: no markup, and no line breaks of the console's own."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def round_json(result: WorkloadResult) -> dict[str, Any]:
    return {
        "figures": result.figures,
        "errors": result.errors,
        "notes": result.notes,
        "requests": [_request_json(timing) for timing in result.requests],
    }


def _request_json(timing: RequestTiming) -> dict[str, Any]:
    return {
        "ttft_ms": milliseconds(timing.ttft),
        "tpot_ms": None if timing.stopped else milliseconds(timing.tpot),
        "prompt_tokens": timing.prompt_tokens,
        "output_tokens": timing.output_tokens,
        "events": len(timing.event_times),
        "stopped": timing.stopped,
        "error": timing.error,
    }


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _count(errors: int) -> str:
    return f"[bold red]{errors}[/]" if errors else "0"
