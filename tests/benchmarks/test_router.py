"""The command: a small run through real processes, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.logged_process import LoggedProcess, StartError, running_module
from benchmarks.router import main
from benchmarks.router_report import FIGURES


def test_a_quick_run_measures_and_misses_an_impossible_target(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = (sys.executable, "-m", "benchmarks.router", "--quick", "--check")
    done = subprocess.run(
        [*command, "--limit-ms=1e-6", "--least-share=100", "--busy-limit-ms=1e-6",
         f"--json={file}"],
        env=os.environ | {"HEXSERVE_CACHE": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "missed: 4 streams: the router adds" in done.stdout
    assert "missed: saturated: " in done.stdout
    assert "missed: at half of its rate the router adds" in done.stdout
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("hexserve-*")), "the sockets' folder is left"

    data = json.loads(file.read_text())
    assert data["benchmark"] == "router"
    assert data["host"]["cores"]
    assert [load["streams"] for load in data["loads"]] == [1, 4]
    for load in data["loads"]:
        assert len(load["rounds"]) == 1
        figures = load["median"]
        assert set(figures) == set(FIGURES)
        for way in ("direct", "routed"):
            assert 0.01 < figures[f"{way}_p50_ms"] <= figures[f"{way}_p99_ms"] < 10_000
        assert figures["added_p50_ms"] == pytest.approx(
            figures["routed_p50_ms"] - figures["direct_p50_ms"]
        )
    busy = data["busy"]
    assert {name: len(values) for name, values in busy["rounds"].items()} == {
        "router_tok_s": 1,
        "bare_tok_s": 1,
        "added_p99_ms": 1,
    }
    assert 0 < busy["share_of_bare"] < 100


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--streams=0"], "0 is not at least 1"),
        (["--limit-ms=-1"], "-1 is not above 0"),
        (["--rate=nan"], "nan is not above 0"),
        (["--streams=300", "--rounds=200"], "more than 65536 requests"),
        (["--json=/no/such/folder/x.json"], "no such folder"),
    ],
)
def test_refusals(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert message in capsys.readouterr().err


def test_a_process_that_ends_is_told_with_its_last_lines(tmp_path: Path) -> None:
    def watch(process: LoggedProcess) -> None:
        while True:
            process.check(deadline=float("inf"))
            time.sleep(0.01)

    with (
        running_module(tmp_path / "log", "benchmarks.paced_worker") as process,
        pytest.raises(StartError, match=r"code 2; its last lines:\n[^$]*--address are|required"),
    ):
        watch(process)


def test_a_process_that_is_late_is_told_and_ended(tmp_path: Path) -> None:
    with (
        pytest.raises(StartError, match="does not become ready"),
        running_module(tmp_path / "log", "benchmarks.paced_worker") as process,
    ):
        process.check(deadline=0.0)
