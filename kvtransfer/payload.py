"""From arrays to bytes and back: packing, checksum, and the checks of a chunk.

A chunk that stays on the devices is no bytes here: its payload is the owner's arrays, of which
only shape and dtype are known to this library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from kvtransfer.errors import IntegrityError, KVTransferError, ProtocolError
from kvtransfer.layout import ALIGNMENT, ALL_LAYERS, KVLayout
from kvtransfer.messages import ArrayHeader, ChunkHeader

Payload = Sequence[Any]
"""One memoryview per array of the layout, or one device array."""

_PIECE_BYTES = 256 << 10
"""What is copied before its checksum is taken: it is in the second level of the cache then."""


def checksum(payload: Iterable[memoryview]) -> int:
    """xxh3_64 over the arrays' bytes one after the other, without padding between them."""
    digest = xxhash.xxh3_64()
    for view in payload:
        digest.update(view)
    return int(digest.intdigest())


def places_of(
    memory: memoryview, arrays: Sequence[ArrayHeader], alignment: int = ALIGNMENT
) -> tuple[memoryview, ...]:
    """The part of `memory` of each array, at the next multiple of `alignment`.

    Raises ProtocolError if they do not fit.
    """
    places, offset = [], 0
    for array in arrays:
        if offset + array.nbytes > len(memory):
            raise ProtocolError(f"a chunk larger than its place of {len(memory)} bytes")
        places.append(memory[offset : offset + array.nbytes])
        offset += -(-array.nbytes // alignment) * alignment
    return tuple(places)


def copy_into(places: Sequence[memoryview], arrays: Sequence[np.ndarray]) -> int:
    """Writes each array, strided or not, into its place in C order. Returns their `checksum`."""
    digest = xxhash.xxh3_64()
    for place, array in zip(places, arrays, strict=True):
        layers = np.frombuffer(place, dtype=array.dtype).reshape(array.shape)
        layer_bytes = array.nbytes // len(array)
        step = max(1, _PIECE_BYTES // max(1, layer_bytes))
        for layer in range(0, len(array), step):
            np.copyto(layers[layer : layer + step], array[layer : layer + step])
            digest.update(place[layer * layer_bytes : (layer + step) * layer_bytes])
    return int(digest.intdigest())


def as_array(data: memoryview, header: ArrayHeader) -> np.ndarray:
    """A read-only array over `data`, as `header` declares it. Valid as long as `data` is."""
    array = np.frombuffer(data, dtype=np.dtype(header.dtype)).reshape(header.shape)
    array.flags.writeable = False
    return array


@lru_cache(maxsize=1024)
def array_headers(layout: KVLayout, tokens: int) -> tuple[ArrayHeader, ...]:
    """What a chunk of `tokens` tokens must declare."""
    return tuple(
        ArrayHeader(spec.name, spec.dtype, spec.shape(tokens), spec.bytes_per_token * tokens)
        for spec in layout.arrays
    )


def check_read(
    layout: KVLayout, arrays: Sequence[Any], start: int, stop: int, padded: int | None
) -> None:
    """Raises KVTransferError if the owner's `read` did not give what the layout says.

    `padded`: arrays of so many tokens, of which the first ones count, will do as well.
    """
    tokens = stop - start
    if padded is not None and arrays and arrays[0].shape[1] == padded:
        tokens = padded
    got = [(array.dtype, tuple(array.shape)) for array in arrays]
    expected = [(spec.numpy_dtype, spec.shape(tokens)) for spec in layout.arrays]
    if got != expected:
        raise KVTransferError(
            f"read of tokens [{start}, {stop}) gave {got}; the layout says {expected}"
        )


def chunk_header(
    layout: KVLayout, slot: int, start: int, stop: int, checksum: int = 0, group: int = ALL_LAYERS
) -> ChunkHeader:
    """The header of the chunk [start, stop), of a group of layers whose `layout` this is."""
    return ChunkHeader(
        slot=slot,
        group=group,
        start=start,
        stop=stop,
        layers=(0, layout.layers),
        heads=(0, layout.heads),
        arrays=array_headers(layout, stop - start),
        checksum=checksum,
    )


def check_header(layout: KVLayout, chunk: ChunkHeader, start: int, total: int) -> None:
    """Raises IntegrityError unless `chunk` begins at `start`, ends within `total` and is whole."""
    where = f"chunk [{chunk.start}, {chunk.stop})"
    group, end = layout.group_at(start, total)
    if chunk.start != start or chunk.stop > end:
        raise IntegrityError(f"{where}: expected tokens from {start} on, up to {end}")
    if chunk.group != group:
        raise IntegrityError(f"{where}: group {chunk.group}; group {group} was asked for")
    check_arrays(layout, chunk)


def check_arrays(layout: KVLayout, chunk: ChunkHeader) -> None:
    """Raises IntegrityError unless `chunk` has the arrays of its group."""
    where = f"chunk [{chunk.start}, {chunk.stop})"
    try:
        layout = layout.part(chunk.group)
    except ValueError as error:
        raise IntegrityError(f"{where}: {error}") from None
    if chunk.layers != (0, layout.layers) or chunk.heads != (0, layout.heads):
        raise IntegrityError(
            f"{where}: holds layers {chunk.layers} and heads {chunk.heads}; "
            f"expected all of {layout.layers} and {layout.heads}"
        )
    if chunk.arrays != array_headers(layout, chunk.stop - chunk.start):
        raise IntegrityError(f"{where}: arrays {chunk.arrays} are not those of the layout")


def check_payload(chunk: ChunkHeader, payload: Sequence[memoryview]) -> None:
    """Raises IntegrityError if the bytes are not those the source declared."""
    found = checksum(payload)
    if found != chunk.checksum:
        raise IntegrityError(
            f"chunk [{chunk.start}, {chunk.stop}): checksum {found:#018x}, "
            f"declared {chunk.checksum:#018x}"
        )
