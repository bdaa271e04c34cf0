from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint import tensor_reader
from checkpoint.errors import CheckpointError
from checkpoint.tensor_reader import NotFinite, TensorReader, bytes_read, cast
from checkpoint.weights import SINGLE_FILE, TensorInfo, open_weights

FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of some hundred bytes are divided as large ones are."""
    monkeypatch.setattr(tensor_reader, "PIECE_BYTES", 100)
    monkeypatch.setattr(tensor_reader, "RUN_BYTES", 16)
    monkeypatch.setattr(tensor_reader, "STRETCH_BYTES", 250)


def write(folder: Path, **tensors: np.ndarray) -> Path:
    save_file(tensors, folder / SINGLE_FILE)
    return folder


def noise(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stored", [*FLOATS, np.int64])
def test_what_is_read_is_what_was_stored(tmp_path: Path, stored: Any, threads: int) -> None:
    tensors = {f"t{size}": noise(size, 7, dtype=stored) for size in (0, 1, 5, 13, 101)}
    tensors["scalar"] = np.array(2.5, stored)
    files = open_weights(write(tmp_path, **tensors))
    with TensorReader(files, threads=threads) as reader:
        for name, tensor in tensors.items():
            read = reader.read(name)
            assert read.dtype == stored
            np.testing.assert_array_equal(read, tensor)


@pytest.mark.parametrize(
    ("index", "read"),
    [
        ((), 4 * 6 * 10),
        ((2,), 6 * 10),
        ((1, slice(2, 5)), 3 * 10),
        ((slice(1, 3),), 2 * 60),
        ((slice(3, 1),), 0),
        ((1, 5, 3), 1),
        ((3, slice(None), slice(2, 4)), 60),  # too narrow
        ((3, slice(None), slice(2, 8)), 36),
        ((3, slice(1, 5), slice(5, None)), 4 * 5),
        ((3, slice(None), slice(None)), 60),
        ((slice(1, 3), slice(2, 5)), 2 * 30),
        ((slice(1, 3), slice(2, 5), slice(0, 9, 2)), 2 * 30),
        ((slice(0, 2), 1), 2 * 60),
        ((slice(None, None, 2),), 240),
        ((-1,), 240),
    ],
)
def test_what_is_read_is_what_is_taken(
    tmp_path: Path, index: tuple[int | slice, ...], read: int
) -> None:
    tensor, counts = noise(4, 6, 10), [0]
    with TensorReader(open_weights(write(tmp_path, w=tensor)), counts.append) as reader:
        np.testing.assert_array_equal(reader.read("w", index), tensor[index])
    assert sum(counts) == 4 * read == bytes_read(TensorInfo(tensor.shape, tensor.dtype), index)


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_casts_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, stored: Any, wanted: Any
) -> None:
    monkeypatch.setattr(tensor_reader, "CAST_ELEMENTS", 100)
    tensor = np.concatenate([noise(13, 21, dtype=stored), np.zeros((1, 21), stored)]) * 100
    for each in (tensor, tensor.T, tensor[1:, 3:], tensor[:0]):
        result = cast(each, np.dtype(wanted))
        assert result.dtype == wanted
        np.testing.assert_array_equal(result, each.astype(wanted))
    assert cast(tensor.T, np.dtype(wanted)).T.flags.c_contiguous
    assert cast(tensor, np.dtype(stored)) is tensor


def test_what_is_too_large_for_float16_is_refused() -> None:
    with pytest.raises(NotFinite, match="float32 is too large for float16"):
        cast(np.array([65504.0, 1e5], np.float32), np.dtype(np.float16))


def test_bytes_are_counted_as_they_are_stored(tmp_path: Path) -> None:
    counts: list[int] = []
    files = open_weights(write(tmp_path, a=noise(101, 7, dtype=np.float16), b=noise(3)))
    with TensorReader(files, counts.append) as reader:
        reader.read("a")
        reader.read("b")
    assert sum(counts) == 101 * 7 * 2 + 3 * 4
    assert max(counts) == 100


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_name(tmp_path: Path, stored: Any, bad: float) -> None:
    tensor = noise(50, 9, dtype=stored)
    tensor[41, 3] = bad
    files = open_weights(write(tmp_path, **{"layer.weight": tensor}))
    with (
        TensorReader(files) as reader,
        pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: layer\.weight holds NaN or infin"),
    ):
        reader.read("layer.weight")


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    files = open_weights(write(tmp_path, w=noise(1000)))
    path = tmp_path / SINGLE_FILE
    with TensorReader(files) as reader:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 8)
        with pytest.raises(CheckpointError, match="cut off at byte"):
            reader.read("w")
        with pytest.raises(CheckpointError, match="'absent'"):
            reader.read("absent")
