"""benchmarks.engine measures the steps of a tiny model, and checks the gap between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import engine

TINY = Path(__file__).parents[1] / "golden" / "tiny" / "tied_llama3"
COMMAND = [
    f"--model={TINY}", "--cores=1", "--rounds=1", "--batches=2", "--contexts=16", "--prompts=32",
]  # fmt: skip


def test_it_measures_steps_beside_their_floors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, trace = tmp_path / "engine.json", tmp_path / "trace"
    assert engine.main([*COMMAND, f"--json={file}", f"--trace={trace}"]) == 0
    assert "gap between two decode steps" in capfd.readouterr().out
    measured = json.loads(file.read_text())["cores"]["1"]
    assert [step["name"] for step in measured["steps"]] == ["decode 2 x 16", "prefill 32"]
    assert all(
        step["floor"] > 0 and 0 < step["device"] < step["step"] for step in measured["steps"]
    )
    assert 0 < measured["gap"] < 1
    assert list(trace.rglob("*.xplane.pb"))


def test_a_long_gap_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "MOST_GAP_S", 0.0)
    assert engine.main([*COMMAND, "--check"]) == 1
    assert "missed: a gap of" in capfd.readouterr().out


def test_what_is_not_there_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert engine.main([f"--model={TINY}", "--cores=4096"]) == 2
    with pytest.raises(SystemExit, match="2"):
        engine.main(["--model=/nowhere"])
    assert "--model /nowhere: no such folder" in capfd.readouterr().err
