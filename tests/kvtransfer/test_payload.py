"""Chunks become bytes: strided or not, in one piece or in many, with the same checksum."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer import payload
from kvtransfer.layout import align_up
from kvtransfer.payload import checksum, copy_into, runs_of


def sliced(dtype: str, layers: int, width: int) -> np.ndarray:
    """[layers, 5, 3, width], contiguous within a layer, as a chunk of a longer array is."""
    bits = np.random.default_rng(width).integers(0, 256, (layers, 9, 3, width, 4), np.uint8)
    return bits.view(dtype)[:, 2:7].reshape(layers, 5, 3, -1)


ARRAYS = [
    sliced("float32", 4, 7),
    np.ascontiguousarray(sliced("bfloat16", 3, 2)),
    sliced("int8", 1, 1).transpose(0, 3, 2, 1),
    np.zeros((2, 0, 3, 7), np.float32),
]
BYTES = [np.ascontiguousarray(array).tobytes() for array in ARRAYS]


@pytest.mark.parametrize("piece", [1, 500, 1 << 20])
def test_arrays_are_copied_to_aligned_places(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(payload, "_PIECE_BYTES", piece)
    target = bytearray(b"?" * sum(map(align_up, map(len, BYTES))))
    assert copy_into(memoryview(target), ARRAYS) == checksum(map(memoryview, BYTES))
    offset = 0
    for wanted in BYTES:
        assert target[offset : offset + len(wanted)] == wanted
        offset += align_up(len(wanted))


def test_runs_are_the_bytes_in_order() -> None:
    runs = list(runs_of(ARRAYS))
    assert b"".join(runs) == b"".join(BYTES)
    assert checksum(runs) == checksum(map(memoryview, BYTES))
    assert len(runs) == 4 + 1 + 1 + 1  # layers of the first, the others whole or copied


def test_what_is_contiguous_is_not_copied() -> None:
    assert all(
        np.shares_memory(np.frombuffer(run, np.uint8), ARRAYS[0]) for run in runs_of(ARRAYS[:1])
    )
