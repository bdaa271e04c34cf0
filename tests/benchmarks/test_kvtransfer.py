"""benchmarks.kvtransfer between real processes and devices, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import kvtransfer
from benchmarks.kv_report import WAYS, Measured


def test_it_measures_every_way_beside_its_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kv.json"
    assert kvtransfer.main(["--sizes=4", "--rounds=2", f"--json={file}"]) == 0
    assert "KV transfers" in capfd.readouterr().out
    (measured,) = json.loads(file.read_text())["sizes"]
    assert measured["mib"] == pytest.approx(4, rel=0.05)
    assert measured["seconds"].keys() == set(WAYS)
    for seconds in measured["seconds"].values():
        assert len(seconds) == 2
        assert min(seconds) > 0


def test_a_share_below_its_target_is_named() -> None:
    seconds = {way: [1.0, 1.0] for way in WAYS} | {"shm": [2.0, 4.0]}
    (line,) = Measured(16, seconds).missed()
    assert line == "shm at 16 MiB: 0.38 of copies, target 0.80"


def test_the_faster_way_by_hand_is_the_limit() -> None:
    seconds = {way: [2.0, 2.0] for way in WAYS}
    (line,) = Measured(16, seconds | {"in chunks": [1.0, 1.5]}).missed()
    assert line == "device at 16 MiB: 0.62 of in chunks, target 0.90"
    assert Measured(16, seconds | {"device": [1.0, 1.0]}).missed() == []


def test_where_the_floor_misses_the_target_it_bounds_the_transport() -> None:
    seconds = {way: [1.0, 1.0] for way in WAYS} | {"bare pair": [2.0, 2.0]}
    assert Measured(1, seconds | {"shm": [2.4, 2.4]}).missed() == []
    (line,) = Measured(1, seconds | {"shm": [3.0, 3.0]}).missed()
    assert line == "shm at 1 MiB: 0.67 of bare pair, target 0.80"


def test_where_the_floor_reaches_the_target_the_limit_bounds_the_transport() -> None:
    seconds = {way: [1.0, 1.0] for way in WAYS} | {"bare pair": [1.1, 1.1], "shm": [1.3, 1.3]}
    (line,) = Measured(16, seconds).missed()
    assert line == "shm at 16 MiB: 0.77 of copies, target 0.80"


def test_grpc_is_held_beside_a_stream_that_packs_and_checks() -> None:
    seconds = {way: [1.0, 1.0] for way in WAYS} | {"packed grpc": [1.2, 1.2]}
    assert Measured(16, seconds | {"grpc": [1.4, 1.4]}).missed() == []
    (line,) = Measured(16, seconds | {"grpc": [1.5, 1.5]}).missed()
    assert line == "grpc at 16 MiB: 0.80 of packed grpc, target 0.85"


def test_devices_that_end_are_reported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kvtransfer, "BETWEEN_DEVICES", ("no such way",))
    monkeypatch.setattr(kvtransfer, "_ORDER", ("no such way",))
    assert kvtransfer.main(["--sizes=1", "--rounds=1"]) == 1
    assert "benchmarks.kv_device" in capfd.readouterr().out
