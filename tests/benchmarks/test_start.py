"""benchmarks.start on the fake model, which starts in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import start


def test_it_measures_and_checks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "start.json"
    arguments = ["--model=fake", "--runs=1", f"--json={figures}", "--check"]
    assert start.main([*arguments, "--limit-s=0.001"]) == 1
    assert "missed: warm start" in capfd.readouterr().err
    measured = json.loads(figures.read_text())
    assert len(measured["warm_s"]) == 1
    assert 0.1 < measured["warm_s"][0] < 60


def test_a_model_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert start.main([f"--model={tmp_path / 'nothing'}", "--runs=0"]) == 1
    assert "has ended with code 2" in capfd.readouterr().err
