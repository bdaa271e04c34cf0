"""What the router benchmark found: figures, table, JSON and missed targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.stats import median, percentile
from benchmarks.token_stamps import Nanoseconds

FIGURES = (
    "direct_p50_ms",
    "direct_p99_ms",
    "routed_p50_ms",
    "routed_p99_ms",
    "added_p50_ms",
)

RoundFigures = dict[str, float]


def round_figures(direct: Nanoseconds, routed: Nanoseconds) -> RoundFigures:
    """Figures of one round from the nanoseconds that each token was on its way.

    What the router adds is told at the median only: the 99th percentiles are mostly the
    machine's hiccups, which do not fall on both ways alike.
    """
    figures = {
        f"{name}_p{percent}_ms": (percentile(way.ravel().tolist(), percent) or 0.0) / 1e6
        for name, way in (("direct", direct), ("routed", routed))
        for percent in (50, 99)
    }
    figures["added_p50_ms"] = figures["routed_p50_ms"] - figures["direct_p50_ms"]
    return figures


def streams_name(streams: int) -> str:
    """Such as "1 stream" or "32 streams"."""
    return f"{streams} stream" + "s" * (streams > 1)


@dataclass(slots=True)
class RouterReport:
    """All rounds, by the number of streams at once."""

    rounds: dict[int, list[RoundFigures]] = field(default_factory=dict)

    def add(self, streams: int, figures: RoundFigures) -> None:
        """Keep one more round."""
        self.rounds.setdefault(streams, []).append(figures)

    def medians(self, streams: int) -> dict[str, float | None]:
        """Each figure's median over the rounds.

        The two ways of a round are neighbours in time, so the median of their differences
        survives a machine whose speed drifts; a difference of medians would not.
        """
        return {name: median(each[name] for each in self.rounds[streams]) for name in FIGURES}

    def missed(self, limit_ms: float) -> list[str]:
        """One line for each number of streams at which the router adds the limit or more."""
        lines = []
        for streams in self.rounds:
            added = self.medians(streams)["added_p50_ms"]
            if added is None or added >= limit_ms:
                lines.append(
                    f"{streams_name(streams)}: the router adds {_number(added)} ms at the median, "
                    f"the target is under {limit_ms:g} ms"
                )
        return lines

    def print(self, console: Console) -> None:
        """Print the table."""
        count = max(len(rounds) for rounds in self.rounds.values())
        plural = "s" * (count > 1)
        table = Table(
            title="a token's way from the worker to the client, ms",
            caption=f"p50 / p99, medians of {count} round{plural}",
        )
        table.add_column("load")
        for title in ("direct (gRPC)", "by router (HTTP)", "router adds, p50", "rounds' range"):
            table.add_column(title, justify="right")
        for streams, rounds in self.rounds.items():
            figures = self.medians(streams)
            ways = [
                f"{_number(figures[f'{way}_p50_ms'])} / {_number(figures[f'{way}_p99_ms'])}"
                for way in ("direct", "routed")
            ]
            added = [each["added_p50_ms"] for each in rounds]
            spread = f"{_number(min(added))} .. {_number(max(added))}"
            table.add_row(streams_name(streams), *ways, _number(figures["added_p50_ms"]), spread)
        console.print(table)

    def as_json(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings, and medians and every round for each number of streams."""
        loads = [
            {"streams": streams, "median": self.medians(streams), "rounds": rounds}
            for streams, rounds in self.rounds.items()
        ]
        return {**settings, "loads": loads}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
