"""What is sent, which gaps count, and one small run from processes to exit status."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.long_prompts import LongPromptReport, itl_p99_ms, long_requests, main
from benchmarks.token_times import TokenTimes
from benchmarks.token_ways import WayError

MS = 1_000_000


def test_gaps_count_while_all_streams_are_under_way() -> None:
    # The second stream begins at 20 ms and ends at 50 ms; the first's gap of 40 ms comes after.
    arrived = np.array([[0, 20, 30, 50, 90], [20, 28, 36, 43, 50]]) * MS
    assert itl_p99_ms(TokenTimes(np.zeros_like(arrived), arrived)) == 20.0
    apart = np.array([[0, 10], [20, 30]]) * MS
    with pytest.raises(WayError, match="ended before the last has begun"):
        itl_p99_ms(TokenTimes(np.zeros_like(apart), apart))


def test_the_figure_is_the_median_round() -> None:
    report = LongPromptReport(quiet=[20.0, 25.0, 20.0], beside=[30.0, 100.0, 36.0], sent=9)
    assert report.quotient == 1.8
    assert "1.80 times (rounds: 1.50, 4.00, 1.80)" in report.line()


def test_every_kind_of_prompt_is_as_long_as_asked_for() -> None:
    requests = long_requests(5000)
    bodies = [json.loads(body) for _, body in requests]
    prompts = [b["prompt"] if "prompt" in b else b["messages"][0]["content"] for b in bodies]
    assert {len(prompt) for prompt in prompts} == {5000}
    assert len({str(prompt) for prompt in prompts}) == len(requests)


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    size = ("--streams=2", "--tokens=30", "--rounds=1", "--characters=2000", "--every=0.05")
    assert main([*size, f"--json={found}", "--check", "--limit=1000"]) == 0
    assert "check passed" in capsys.readouterr().out
    rounds = json.loads(found.read_text())["rounds"]
    assert rounds["quiet_itl_p99_ms"][0] > 0
    assert main([*size, "--check", "--limit=0.001"]) == 1
    assert "the target is 0.001" in capsys.readouterr().out
