"""benchmarks.kvtransfer between two real processes, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kvtransfer
from benchmarks.kvtransfer import Measured


def test_it_measures_every_way_beside_its_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kv.json"
    assert kvtransfer.main(["--sizes=4", "--rounds=2", f"--json={file}"]) == 0
    assert "KV transfers between two processes" in capfd.readouterr().out
    (measured,) = json.loads(file.read_text())["sizes"]
    assert measured["mib"] == pytest.approx(4, rel=0.05)
    assert measured["seconds"].keys() == set(kvtransfer.WAYS)
    for seconds in measured["seconds"].values():
        assert len(seconds) == 2
        assert min(seconds) > 0


def test_a_share_below_its_target_is_named() -> None:
    seconds = {"shm": [2.0, 4.0], "copies": [1.0, 1.0], "grpc": [1.0, 1.0], "bare grpc": [1.0, 1.0]}
    (line,) = Measured(16, seconds).missed()
    assert line == "shm at 16 MiB: 0.38 of copies, target 0.80"
