"""A chunk's frame, packed where it leaves from.

gRPC sends bytes objects. To join one from its parts would read all of a chunk a second time,
after it has left the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvtransfer.channel import Packed
from kvtransfer.frames import encode_header
from kvtransfer.messages import LARGEST_CHECKSUM, ChunkHeader
from kvtransfer.payload import copy_into, places_of

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype, _new_bytes.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype, _address_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)


def pack_frame(chunk: ChunkHeader, arrays: Sequence[np.ndarray]) -> Packed:
    """The frame of a chunk, its header with the checksum of `arrays`, as one bytes object."""
    # The header comes first and is known last: one as long keeps its place.
    place = encode_header(replace(chunk, checksum=LARGEST_CHECKSUM))
    frame, memory = unfilled_bytes(len(place) + sum(array.nbytes for array in chunk.arrays))
    digest = copy_into(places_of(memory[len(place) :], chunk.arrays, alignment=1), arrays)
    header = replace(chunk, checksum=digest)
    encoded = encode_header(header)
    if len(encoded) < len(place):  # one checksum in 2**32 is that small
        return Packed(header, encoded + frame[len(place) :])
    memory[: len(encoded)] = encoded
    return Packed(header, frame)


def unfilled_bytes(size: int) -> tuple[bytes, memoryview]:
    """A bytes object of whatever, and its memory, of 2 bytes at least.

    To fill bytes is what CPython allows to who has just made them, as long as nobody else has
    seen them or taken their hash. The memory must not be used after them.
    """
    data: bytes = _new_bytes(None, size)
    memory = (ctypes.c_char * size).from_address(_address_of(data))
    return data, memoryview(memory).cast("B")
