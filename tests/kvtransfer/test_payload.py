"""Chunks become bytes: strided or not, in one piece or in many, with the same checksum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtransfer import KVLayout, ProtocolError, chunk_frame, payload
from kvtransfer.frames import encode_header
from kvtransfer.layout import align_up
from kvtransfer.messages import ArrayHeader
from kvtransfer.payload import checksum, chunk_header, copy_into, places_of


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
HEADERS = [ArrayHeader("", str(a.dtype), a.shape, a.nbytes) for a in ARRAYS]
BYTES = [np.ascontiguousarray(array).tobytes() for array in ARRAYS]


@pytest.mark.parametrize("piece", [1, 500, 1 << 20])
def test_arrays_are_copied_to_aligned_places(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(payload, "_PIECE_BYTES", piece)
    target = bytearray(b"?" * sum(map(align_up, map(len, BYTES))))
    places = places_of(memoryview(target), HEADERS)
    assert copy_into(places, ARRAYS) == checksum(map(memoryview, BYTES))
    offset = 0
    for wanted in BYTES:
        assert target[offset : offset + len(wanted)] == wanted
        offset += align_up(len(wanted))


def test_places_must_fit() -> None:
    memory = memoryview(bytearray(sum(map(len, BYTES))))
    assert [len(place) for place in places_of(memory, HEADERS, alignment=1)] == list(
        map(len, BYTES)
    )
    for short, alignment in (memory[1:], 1), (memory, 64):
        with pytest.raises(ProtocolError, match="larger than its place"):
            places_of(short, HEADERS, alignment)


@pytest.mark.parametrize("small", [False, True])
def test_a_frame_is_packed_in_place(monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    if small:  # a checksum that takes less room than most
        monkeypatch.setattr(chunk_frame, "copy_into", lambda *given: copy_into(*given) and 5)
    chunk = replace(chunk_header(KVLayout("m", ()), 1, 8, 13), arrays=tuple(HEADERS))
    packed = chunk_frame.pack_frame(chunk, ARRAYS)
    wanted = 5 if small else checksum(map(memoryview, BYTES))
    assert packed.header == replace(chunk, checksum=wanted)
    assert packed.content == encode_header(packed.header) + b"".join(BYTES)
