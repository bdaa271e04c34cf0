"""benchmarks.load on a checkpoint of a few MiB."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import load
from checkpoint.weights import open_weights


def test_the_checkpoint_has_the_size_that_is_asked_for(tmp_path: Path) -> None:
    size = load.write_checkpoint(tmp_path, 16 / 1024)
    assert abs(size / 2**20 - 16) < 4
    infos = open_weights(tmp_path).names.values()
    assert sum(info.nbytes for info in infos) == size
    assert len(list(tmp_path.glob("model-*.safetensors"))) == load.SHARDS


def test_it_measures_reads_and_loads(tmp_path: Path) -> None:
    figures, folder = tmp_path / "load.json", tmp_path / "model"
    arguments = ["--gib=0.015", "--rounds=1", f"--folder={folder}", f"--json={figures}"]
    assert load.main(arguments) == 0
    measured = json.loads(figures.read_text())
    assert len(measured["read_gib_s"]) == 4
    halves, wholes = measured["loads"]["bfloat16"], measured["loads"]["float32"]
    assert halves["weights"] < wholes["weights"]
    assert wholes["weights"] > 1.9 * measured["bytes"]


def test_what_is_missed_is_said() -> None:
    reads = {"page cache, 1 thread": [2.0, 1.0], "page cache, 8 threads": [1.5, 1.59]}
    fits, does_not = ({"above": above * 2**20, "allowed": 100 * 2**20} for above in (100, 101))
    assert load._missed(reads, {"bfloat16": fits, "float32": does_not}) == [
        "8 threads read at 1.59 GiB/s, one at 2.00",
        "as float32: 101 MiB above the weights, 100 are allowed",
    ]


def test_what_is_kept_is_left_where_it_was_put(tmp_path: Path) -> None:
    with load._folder(tmp_path / "kept") as folder:
        (folder / "file").touch()
    assert (tmp_path / "kept" / "file").exists()
    with load._folder(None) as folder:
        (folder / "file").touch()
    assert not folder.exists()
