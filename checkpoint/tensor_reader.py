"""Reads tensors for the engine: by several threads, NaN refused, converted to what it wants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from checkpoint.errors import CheckpointError
from checkpoint.host_array import empty_pages
from checkpoint.weights import TensorInfo, WeightFiles

PIECE_BYTES = 1 << 20
"""What one read asks for. Larger ones read no faster and no longer fit a core's cache, where a
piece is checked."""
RUN_BYTES = 4096
"""Columns of a matrix that are narrower are read with those beside them: asking costs more."""
STRETCH_BYTES = 8 << 20
"""A tensor is divided among the threads in stretches of at least this."""
CAST_ELEMENTS = 1 << 18
"""Are converted at once, for the same reason."""
READ_THREADS = 8
"""Enough to keep network storage busy; local disks are read at their full rate by fewer."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INFINITY = {BFLOAT16: np.uint16(0x7F80), np.dtype(np.float16): np.uint16(0x7C00)}
"""The bits of infinity, which are all of the exponent's; NaN has them too."""


class NotFinite(ValueError):
    """A tensor holds NaN or infinity; the message says as what."""


class TensorReader:
    """Reads tensors of one checkpoint. Thread-safe; to be closed, as a context manager.

    `on_bytes` is told how many bytes have been read, by several threads.
    """

    def __init__(
        self,
        files: WeightFiles,
        on_bytes: Callable[[int], None] = lambda count: None,
        threads: int = READ_THREADS,
    ) -> None:
        self._files = files
        self._on_bytes = on_bytes
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-weights")

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, name: str, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        """Returns tensor `name` as it is stored, or what `index` takes out of it.

        Where `index` takes one of several stacked matrices, some of the rows of one, or columns
        that are RUN_BYTES wide or more, nothing else is read.

        Raises:
            CheckpointError: there is no such tensor, its file cannot be read, or what was read
                of it holds NaN or infinity.
        """
        info = self._files.info(name)
        block, rest = _block(info, index)
        part = empty_pages(block.shape, info.dtype)
        flat = part.reshape(-1)

        def read(begin: int, end: int) -> None:
            step = max(1, PIECE_BYTES // info.dtype.itemsize)
            for at in range(begin, end, step):
                piece = flat[at : min(at + step, end)]
                self._fill(name, block, at, piece)
                if not is_finite(piece):
                    raise CheckpointError(f"{self._files.path(name)}: {name} holds NaN or infinity")
                self._on_bytes(piece.nbytes)

        spans = _stretches(flat.size, info.dtype.itemsize, self._threads)
        list(self._pool.map(read, *zip(*spans, strict=True)) if spans else ())
        return part[rest]

    def _fill(self, name: str, block: _Block, at: int, piece: np.ndarray) -> None:
        """Fill `piece` with the elements of a block from its element `at` on."""
        while piece.size:
            run, column = divmod(at, block.run)
            part = piece[: block.run - column]
            offset = (block.first + run * block.stride + column) * part.itemsize
            self._files.read_into(name, offset, part.view(np.uint8).data)
            at, piece = at + part.size, piece[part.size :]


def bytes_read(info: TensorInfo, index: tuple[int | slice, ...] = ()) -> int:
    """How many `TensorReader.read` reads of such a tensor."""
    return math.prod(_block(info, index)[0].shape) * info.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Block:
    """What is read of a tensor: runs of `run` elements, `stride` apart, from element `first` on."""

    first: int
    run: int
    stride: int
    shape: tuple[int, ...]


def cast(tensor: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """`tensor` in `dtype`, rounded; itself where it is of that dtype already.

    Lies in memory as `tensor` does: to turn a matrix around takes longer than to convert it.

    Raises:
        NotFinite: a finite value is too large for `dtype`.
    """
    if tensor.dtype == dtype:
        return tensor
    if tensor.T.flags.c_contiguous and not tensor.flags.c_contiguous:
        return cast(tensor.T, dtype).T
    result = empty_pages(tensor.shape, dtype)
    source, target = np.ascontiguousarray(tensor).reshape(-1), result.reshape(-1)
    for first in range(0, source.size, CAST_ELEMENTS):
        piece = target[first : first + CAST_ELEMENTS]
        _convert(source[first : first + CAST_ELEMENTS], piece)
        if dtype == np.float16 and not is_finite(piece):
            raise NotFinite(f"a value of {tensor.dtype} is too large for {dtype}")
    return result


def _convert(source: np.ndarray, target: np.ndarray) -> None:
    if source.dtype == BFLOAT16 and target.dtype == np.float32:
        # ml_dtypes' own conversion holds up every other thread.
        bits = target.view(np.uint32)
        bits[:] = source.view(np.uint16)
        bits <<= 16
    else:
        with np.errstate(over="ignore"):  # infinity is found by the check
            target[:] = source.astype(target.dtype)


def is_finite(piece: np.ndarray) -> bool:
    """Whether `piece` holds neither NaN nor infinity."""
    if infinity := _INFINITY.get(piece.dtype):  # isfinite is ten times slower on 16 bits
        exponents = piece.view(np.uint16) & infinity
        return not piece.size or bool(exponents.max() < infinity)
    return not _is_float(piece.dtype) or bool(np.isfinite(piece).all())


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name.startswith(("bfloat16", "float8"))


def _block(
    info: TensorInfo, index: tuple[int | slice, ...]
) -> tuple[_Block, tuple[int | slice, ...]]:
    """What to read for `index`, and what to take out of that."""
    first, shape, rest = 0, info.shape, list(index)
    while rest and isinstance(place := rest[0], int) and 0 <= place < shape[0]:
        first += place * math.prod(shape[1:])
        shape, rest = shape[1:], rest[1:]
    # What numpy has to do is left to it: count from the end, take steps, complain.
    if rest and (rows := _range(rest[0], shape[0])) is not None:
        inner = math.prod(shape[1:])
        first += rows.start * inner
        shape, rest[0] = (len(rows), *shape[1:]), slice(None)
        if len(rest) > 1 and (columns := _range(rest[1], shape[1])) is not None:
            width = math.prod(shape[2:])
            run = len(columns) * width
            if run < inner and run * info.dtype.itemsize >= RUN_BYTES:
                shape, rest[1] = (shape[0], len(columns), *shape[2:]), slice(None)
                return _Block(first + columns.start * width, run, inner, shape), tuple(rest)
    size = max(1, math.prod(shape))
    return _Block(first, size, size, shape), tuple(rest)


def _range(entry: int | slice, size: int) -> range | None:
    """What a slice without steps takes of `size`; None for anything else."""
    if not isinstance(entry, slice):
        return None
    found = range(size)[entry]
    return found if found.step == 1 else None


def _stretches(size: int, itemsize: int, threads: int) -> Sequence[tuple[int, int]]:
    """`size` elements in at most `threads` spans (begin, end) of STRETCH_BYTES or more."""
    count = max(1, min(threads, size * itemsize // STRETCH_BYTES))
    bounds = [size * part // count for part in range(count + 1)]
    return [(a, b) for a, b in itertools.pairwise(bounds) if a < b]
