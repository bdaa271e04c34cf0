"""Medians, ratios, targets and tables."""

import io

import pytest
from rich.console import Console

from benchmarks.report import FIGURES, Report, Server
from benchmarks.targets import Target
from benchmarks.workloads import Figures, WorkloadResult


def result(errors: list[str] | None = None, **figures: float | None) -> WorkloadResult:
    """A result with these figures, all others not measured."""
    known: Figures = {"ttft_p50_ms": 1.0, "output_tok_s": None}
    return WorkloadResult(known | figures, [], errors or [])


def comparison() -> Report:
    """Three rounds, the second of them on a machine twice as slow."""
    report = Report([Server("A", "http://a", "m"), Server("B", "http://b", "m")])
    for first, second in ((30.0, 20.0), (16.0, 10.0), (28.0, 20.0)):
        report.add("w2", 0, result(output_tok_s=first))
        report.add("w2", 1, result(output_tok_s=second))
    return report


def printed(report: Report) -> str:
    """What the report prints."""
    stream = io.StringIO()
    report.print(Console(file=stream, width=110))
    return stream.getvalue()


def test_medians_and_ratios_over_rounds() -> None:
    report = comparison()
    assert report.medians("w2", 0)["output_tok_s"] == 28.0
    assert report.medians("w2", 1)["output_tok_s"] == 20.0
    assert report.round_ratios("w2")["output_tok_s"] == pytest.approx([1.5, 1.6, 1.4])
    assert report.ratios("w2")["output_tok_s"] == pytest.approx(1.5)


def test_targets_speak_about_ratios_of_two_servers() -> None:
    report = comparison()
    kept = [Target.parse("w2.output_tok_s>=1.5"), Target.parse("w2.ttft_p50_ms<=1")]
    assert report.missed(kept) == []
    assert report.missed([Target.parse("w2.output_tok_s>1.5")]) == ["w2.output_tok_s>1.5: is 1.5"]


def test_targets_speak_about_figures_of_one_server() -> None:
    report = Report([Server("A", "http://a", "m")])
    report.add("w1", 0, result(tpot_p50_ms=12.0))
    assert report.missed([Target.parse("w1.tpot_p50_ms < 12.5")]) == []
    assert report.missed([Target.parse("w1.tpot_p50_ms<12")]) == ["w1.tpot_p50_ms<12: is 12"]
    assert report.missed([Target.parse("w1.itl_p50_ms<12")]) == ["w1.itl_p50_ms<12: not measured"]


@pytest.mark.parametrize("text", ["", "w2.x", "w2>=1", "w2.x=1", "w2.x>=one", "w2.x>=1.2.3"])
def test_a_target_must_be_readable(text: str) -> None:
    with pytest.raises(ValueError, match="target"):
        Target.parse(text)


def test_the_comparison_shows_both_servers_and_the_ratio() -> None:
    lines = printed(comparison()).splitlines()
    assert "medians of 3 rounds" in "\n".join(lines)
    (line,) = [line for line in lines if FIGURES["output_tok_s"] in line]
    assert [cell.strip() for cell in line.strip("│ ").split("│")] == [
        "output tok/s",
        "28.0",
        "20.0",
        "1.500",
        "1.400 .. 1.600",
    ]


def test_the_summary_has_a_row_for_each_workload() -> None:
    report = Report([Server("[mine]", "http://a", "m")])
    report.add("w1", 0, result(ttft_p99_ms=1234.5, tpot_p50_ms=7.0))
    report.add("w4", 0, result(itl_max_ms=99.0))
    text = printed(report)
    assert "[mine]" in text
    assert "1.0 / 1,234.5" in text
    assert "w4: ITL max ms 99.0" in text


def test_errors_are_counted_and_shown() -> None:
    report = comparison()
    report.add("w3", 0, result())
    report.add("w3", 1, result(errors=["HTTP 400: too long"] * 5, ttft_p50_ms=None))
    text = printed(report)
    assert "FAILED: w3 on B: no request succeeded" in text
    assert "error: w3 on B: HTTP 400: too long" in text
    assert "5 requests failed in all" in text
    assert len(report.errors) == 5
