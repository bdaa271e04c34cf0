"""Figures of rounds, their medians, and missed targets."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from benchmarks.router_report import RouterReport, round_figures


def added(p50: float) -> dict[str, float]:
    return {
        "direct_p50_ms": 1.0, "direct_p99_ms": 2.0,
        "routed_p50_ms": 1.0 + p50, "routed_p99_ms": 5.0,
        "added_p50_ms": p50,
    }  # fmt: skip


def test_figures_are_percentiles_of_all_tokens_in_milliseconds() -> None:
    direct = np.arange(1, 101, dtype=np.int64).reshape(4, 25) * 1_000_000
    assert round_figures(direct, 3 * direct) == {
        "direct_p50_ms": 50.0, "direct_p99_ms": 99.0,
        "routed_p50_ms": 150.0, "routed_p99_ms": 297.0,
        "added_p50_ms": 100.0,
    }  # fmt: skip


def test_a_target_speaks_about_the_median_round_of_each_load() -> None:
    report = RouterReport()
    for value in (0.5, 1.9, 9.0):
        report.add(1, added(value))
    for value in (0.5, 2.0, 2.5):
        report.add(32, added(value))
    assert report.missed(2.5) == []
    assert report.missed(2.0) == [
        "32 streams: the router adds 2.00 ms at the median, the target is under 2 ms"
    ]
    assert [line.partition(":")[0] for line in report.missed(1.0)] == ["1 stream", "32 streams"]


def test_the_table_and_the_json_tell_every_load() -> None:
    report = RouterReport()
    report.add(1, added(0.4))
    report.add(32, added(1.5))
    report.add(32, added(1.7))
    out = io.StringIO()
    report.print(Console(file=out, width=110))
    assert "1.00 / 2.00" in out.getvalue()
    assert "1.40 / 5.00" in out.getvalue()
    assert "1.50 .. 1.70" in out.getvalue()
    data = report.as_json({"rate": 50})
    assert data["rate"] == 50
    assert [load["median"]["added_p50_ms"] for load in data["loads"]] == pytest.approx([0.4, 1.6])
    assert [len(load["rounds"]) for load in data["loads"]] == [1, 2]
