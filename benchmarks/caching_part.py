"""What one part of the caching benchmark has measured, and the server that it measures."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.logged_process import running_module

_START_S = 900.0


@dataclass(frozen=True, slots=True)
class Part:
    """Figures of two or more ways, side by side.

    Attributes:
        title: what was done.
        columns: the ways, in order.
        rows: figure → its value in each way; None where it has none.
        bounds: what is held against a target → (value, the most that it may be).
        floors: likewise → (value, the least that it may be).
    """

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float | None, ...]]
    bounds: Mapping[str, tuple[float | None, float]] = field(default_factory=dict)
    floors: Mapping[str, tuple[float | None, float]] = field(default_factory=dict)

    @property
    def missed(self) -> list[str]:
        """A line for every target that is not kept."""
        return [
            f"{name} is {'not measured' if value is None else f'{value:.3g}'}, {target}"
            for name, value, target, kept in self.targets()
            if not kept
        ]

    def targets(self) -> Iterator[tuple[str, float | None, str, bool]]:
        """Name, value, target in words, and whether it is kept."""
        for name, (value, most) in self.bounds.items():
            yield name, value, f"at most {most:g}", value is not None and value <= most
        for name, (value, least) in self.floors.items():
            yield name, value, f"at least {least:g}", value is not None and value >= least

    def table(self) -> Table:
        table = Table("", *self.columns, title=self.title)
        for name, values in self.rows.items():
            table.add_row(name, *map(_shown, values))
        for name, value, target, _ in self.targets():
            shown = "" if value is None else f"{value:.3g}"
            table.add_row(name, f"{shown} ({target})")
        return table

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "figures": {
                name: dict(zip(self.columns, values, strict=True))
                for name, values in self.rows.items()
            },
            "bounds": {name: {"value": v, "most": most} for name, (v, most) in self.bounds.items()},
            "floors": {
                name: {"value": v, "least": least} for name, (v, least) in self.floors.items()
            },
        }


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The URL of a server with these flags, ready.

    Raises:
        StartError: it does not become ready.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        running_module(
            Path(folder) / "serve.log",
            "hex_llm.server.api_server",
            "--host=127.0.0.1",
            "--port=0",
            *flags,
        ) as server,
    ):
        server.wait_for("ready at http", time.monotonic() + _START_S)
        yield "http" + server.output.split("ready at http", 1)[1].split()[0]
