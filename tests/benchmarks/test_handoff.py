"""The handoff benchmark: which gap is busy, its targets, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.handoff import Figures, Handoff, main, split_gaps
from tests.benchmarks.fake_server import FakeServer

QUIET = [0.030] * 90 + [0.040] * 10


def test_a_gap_is_busy_when_it_touches_a_window() -> None:
    gaps = [(0.0, 1.0), (1.0, 2.0), (2.0, 2.9), (2.9, 4.5), (4.5, 5.1), (6.1, 7.1)]
    quiet, busy = split_gaps(gaps, [(3.0, 4.0), (5.0, 6.0)], start=0.5)
    assert quiet == pytest.approx([1.0, 0.9, 1.0])
    assert busy == pytest.approx([1.6, 0.6])


@pytest.mark.parametrize(
    ("gap", "busy", "missed"),
    [
        (0.120, 0.046, []),  # 1.15 times the quiet p99
        (0.131, 0.046, ["handoff: 10.1%"]),
        (0.010, 0.0461, ["busy ITL p99: 46.1 ms, target 46.0"]),
    ],
)
def test_targets(gap: float, busy: float, missed: list[str]) -> None:
    handoff = Handoff(ttft=1.0, gap=gap, step=0.030)
    lines = Figures([handoff], QUIET, [0.030] * 50 + [busy] * 2).missed()
    assert len(lines) == len(missed)
    assert all(line.startswith(start) for line, start in zip(lines, missed, strict=True))


def test_the_command(fake: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fake.ttft, fake.tpot = 0.05, 0.005
    command = ["--url", fake.url, "--prompts=2", "--prompt_tokens=20", "--settle=0.1"]
    file = tmp_path / "handoff.json"
    assert main([*command, "--pause=0.1", "--json", str(file)]) == 0
    assert "handoff / TTFT" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert len(report["handoffs"]) == 2
    assert report["busy"]
    assert report["quiet"]
    fake.fault = "http"
    assert main([*command, "--pause=0.1"]) == 1
    assert "cannot measure" in capsys.readouterr().out
