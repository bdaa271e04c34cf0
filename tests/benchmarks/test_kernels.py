"""benchmarks.kernels measures one case and checks it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kernels
from benchmarks.kernels import Measured


def test_it_measures_a_case_beside_its_floor(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernels.json"
    arguments = ["--cores=1", "--rounds=1", "--only=KV write float32", f"--json={file}"]
    assert kernels.main(arguments) == 0
    assert "KV write" in capfd.readouterr().out
    (measured,) = json.loads(file.read_text())["kernels"]
    assert measured["floor"] == "memcpy"
    assert measured["speed"] > 0
    assert measured["floor_speed"] > 0
    assert measured["times_reference"] > 0


def test_what_is_below_its_target_is_named() -> None:
    slow = Measured(2, "linear", "float32", "memory", 1.0, 4.0, 0.25, None, 0.8)
    assert slow.missed() == "linear float32 on 2 cores: 0.25 of memory, target 0.80"
    assert Measured(2, "linear", "float32", "memory", 4, 4, 0.8, None, 0.8).missed() is None
    assert Measured(2, "linear", "float32", "memory", 1, 4, 0.2, None, None).missed() is None


def test_cores_that_are_not_there_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--cores=4096"]) == 2
    assert "4096 cores are not there" in capfd.readouterr().out


def test_a_check_needs_the_library_it_compares_with(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    assert kernels.main(["--check"]) == 2
    assert "--check needs torch" in capfd.readouterr().out
