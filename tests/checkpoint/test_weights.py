from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint.errors import CheckpointError
from checkpoint.weights import INDEX_FILE, SINGLE_FILE, TensorInfo, open_weights

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6, dtype=np.int8),
    "c.scale": np.array(3.5, dtype=np.float16),
    "d.weight": np.arange(8).reshape(2, 4).astype(ml_dtypes.bfloat16),
    "e.empty": np.empty((0, 4), np.float32),
}


def raw_file(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_shards(folder: Path, shards: dict[str, list[str]], weight_map: Any = None) -> None:
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / shard)
    if weight_map is None:
        weight_map = {name: shard for shard, names in shards.items() for name in names}
    folder.joinpath(INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def check_all(folder: Path) -> None:
    weights = open_weights(folder)
    assert weights.names == {
        name: TensorInfo(value.shape, value.dtype) for name, value in TENSORS.items()
    }
    for name, value in TENSORS.items():
        read = weights.read(name)
        assert read.dtype == value.dtype
        assert not read.flags.writeable or read.size == 0
        np.testing.assert_array_equal(read, value)


def test_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    check_all(tmp_path)
    with pytest.raises(CheckpointError, match="'absent'"):
        open_weights(tmp_path).read("absent")


def test_shards(tmp_path: Path) -> None:
    names = list(TENSORS)
    write_shards(tmp_path, {"m-1.safetensors": names[:2], "m-2.safetensors": names[2:]})
    check_all(tmp_path)


def test_views_outlive_the_files_and_threads_read_at_once(tmp_path: Path) -> None:
    big = {f"t{i}": np.full((1000, 10), i, np.float32) for i in range(20)}
    save_file(big, tmp_path / SINGLE_FILE)
    with ThreadPoolExecutor(8) as pool:
        arrays = dict(zip(big, pool.map(open_weights(tmp_path).read, big), strict=True))
    for name, value in big.items():
        np.testing.assert_array_equal(arrays[name], value)


def test_unaligned_data(tmp_path: Path) -> None:
    header = json.dumps({"x": entry(0, 8, [2], "F32")}).encode()
    header += b" " * (1 - len(header) % 4 + 4)
    raw_file(tmp_path / SINGLE_FILE, header, np.array([1, 2], np.float32).tobytes())
    assert open_weights(tmp_path).read("x").tolist() == [1, 2]


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1, -30])
def test_half_written(tmp_path: Path, keep: int) -> None:
    path = tmp_path / SINGLE_FILE
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"cut off|too short"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"x": entry(0, 4)}, 5, "too long"),
        ({"x": entry(0, 4), "y": entry(2, 6)}, 6, "'y' begins at byte 2, expected 4"),
        ({"x": entry(4, 8)}, 8, "'x' begins at byte 4, expected 0"),
        ({"x": entry(0, 4, [3])}, 4, "'x' has 4 bytes, but shape .3. of U8 takes 3"),
        ({"x": entry(4, 0, [4])}, 4, "'x' has -4 bytes"),
        ({"x": entry(0, 4, dtype="F9")}, 4, "'x' has an unsupported dtype 'F9'"),
        ({"x": entry(0, 4, dtype=[])}, 4, "'x' has an unsupported dtype"),
        ({"x": entry(0, 4, [-4])}, 4, "bad shape"),
        ({"x": entry(0, 4, [4.0])}, 4, "bad shape"),
        ({"x": entry(0, 4, "4")}, 4, "bad shape"),
        ({"x": {**entry(0, 4), "data_offsets": [0]}}, 4, "bad data_offsets"),
        ({"x": {**entry(0, 4), "data_offsets": None}}, 4, "bad data_offsets"),
        ({"x": 1}, 0, "bad header entry"),
        ([], 0, "must hold a JSON object"),
        (b"\x80", 0, "not UTF-8"),
        (b'{"x": {}, "x": {}}', 0, "'x' is given twice"),
    ],
)
def test_bad_headers(tmp_path: Path, header: Any, size: int, message: str) -> None:
    raw_file(tmp_path / SINGLE_FILE, header, bytes(size))
    with pytest.raises(CheckpointError, match=message):
        open_weights(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, {"m-1.safetensors": ["a.weight"], "m-2.safetensors": ["b.weight"]})
    tmp_path.joinpath("m-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"m-2.safetensors: the shard is missing"):
        open_weights(tmp_path)


def test_index_names_a_tensor_that_the_shard_lacks(tmp_path: Path) -> None:
    shards = {"m-1.safetensors": ["a.weight"]}
    write_shards(tmp_path, shards, dict.fromkeys(["a.weight", "b.weight"], "m-1.safetensors"))
    with pytest.raises(CheckpointError, match=r"'b.weight' is not in m-1.safetensors"):
        open_weights(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    shards = {"m-1.safetensors": ["a.weight", "b.weight"], "m-2.safetensors": ["a.weight"]}
    write_shards(tmp_path, shards)
    with pytest.raises(CheckpointError, match=r"'a.weight' is in both m-1.* and m-2"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [None, [], {}, {"a": 1}, {"a": "../m.safetensors"}, {"a": ""}]
)
def test_bad_index(tmp_path: Path, weight_map: Any) -> None:
    tmp_path.joinpath(INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        open_weights(tmp_path)


def test_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"neither {SINGLE_FILE}"):
        open_weights(tmp_path)
    tmp_path.joinpath("model-00001-of-00002.safetensors").touch()
    with pytest.raises(CheckpointError, match="shards need their index file"):
        open_weights(tmp_path)
    tmp_path.joinpath("pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin.*convert the model"):
        open_weights(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        open_weights(tmp_path / "absent")
