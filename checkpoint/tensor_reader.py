"""Reads whole tensors for the engine: by several threads, in the dtype it wants, NaN refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from checkpoint.errors import CheckpointError
from checkpoint.weights import WeightFiles

PIECE_BYTES = 1 << 20
"""What one read asks for. Larger ones read no faster and no longer fit a core's cache, where a
piece is converted and checked."""
STRETCH_BYTES = 8 << 20
"""A tensor is divided among the threads in stretches of at least this."""
READ_THREADS = 8
"""Enough to keep network storage busy; local disks are read at their full rate by fewer."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INFINITY = {BFLOAT16: np.uint16(0x7F80), np.dtype(np.float16): np.uint16(0x7C00)}
"""The bits of infinity, which are all of the exponent's; NaN has them too."""


class NotFinite(ValueError):
    """A piece of a tensor holds NaN or infinity."""


class TensorReader:
    """Reads tensors of one checkpoint. Thread-safe; to be closed, as a context manager.

    `dtype` is what floating-point tensors are converted to, None leaves them as they are
    stored. `on_bytes` is told how many stored bytes have been read, from several threads.
    """

    def __init__(
        self,
        files: WeightFiles,
        dtype: Any = None,
        on_bytes: Callable[[int], None] = lambda count: None,
        threads: int = READ_THREADS,
    ) -> None:
        self._files = files
        self._dtype = None if dtype is None else np.dtype(dtype)
        self._on_bytes = on_bytes
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-weights")

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, name: str) -> np.ndarray:
        """Returns tensor `name`, an array of its own.

        Raises:
            CheckpointError: there is no such tensor, its file cannot be read, or it holds NaN
                or infinity (float16 has no larger numbers than 65504).
        """
        info = self._files.info(name)
        wanted = self._dtype if self._dtype is not None and _is_float(info.dtype) else info.dtype
        whole = np.empty(info.shape, wanted)
        flat = whole.reshape(-1)

        def read(begin: int, end: int) -> None:
            self._read_stretch(name, info.dtype, flat, begin, end)

        spans = _stretches(flat.size, info.dtype.itemsize, self._threads)
        try:
            list(self._pool.map(read, *zip(*spans, strict=True)) if spans else ())
        except NotFinite as error:
            hint = ""
            if wanted == np.float16 != info.dtype:
                hint = f", perhaps too large for it: {info.dtype} is what is stored"
            raise CheckpointError(
                f"{self._files.path(name)}: {name} holds NaN or infinity as {wanted}{hint}"
            ) from error
        return whole

    def _read_stretch(
        self, name: str, stored: np.dtype[Any], out: np.ndarray, begin: int, end: int
    ) -> None:
        """Elements [begin, end) of the flat tensor, piece by piece."""
        step = max(1, PIECE_BYTES // stored.itemsize)
        direct = out.dtype == stored
        scratch = None if direct else np.empty(min(step, end - begin), stored)
        for first in range(begin, end, step):
            piece = out[first : min(first + step, end)]
            raw = piece if scratch is None else scratch[: piece.size]
            self._files.read_into(name, first * stored.itemsize, memoryview(raw.view(np.uint8)))
            if not direct:
                convert(raw, piece)
            if not is_finite(piece):
                raise NotFinite
            self._on_bytes(raw.nbytes)


def convert(source: np.ndarray, target: np.ndarray) -> None:
    """Puts `source` into `target` [n], rounded to its dtype."""
    if source.dtype == BFLOAT16 and target.dtype == np.float32:
        # ml_dtypes' own conversion is slow, and holds up every other thread.
        bits = target.view(np.uint32)
        bits[:] = source.view(np.uint16)
        bits <<= 16
    else:
        with np.errstate(over="ignore"):  # what becomes infinity is found by the check
            target[:] = source.astype(target.dtype)


def is_finite(piece: np.ndarray) -> bool:
    """Whether `piece` holds neither NaN nor infinity."""
    if infinity := _INFINITY.get(piece.dtype):  # isfinite is ten times slower on 16 bits
        exponents = piece.view(np.uint16) & infinity
        return not piece.size or bool(exponents.max() < infinity)
    return not _is_float(piece.dtype) or bool(np.isfinite(piece).all())


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name.startswith(("bfloat16", "float8"))


def _stretches(size: int, itemsize: int, threads: int) -> Sequence[tuple[int, int]]:
    """`size` elements in at most `threads` spans (begin, end) of STRETCH_BYTES or more."""
    count = max(1, min(threads, size * itemsize // STRETCH_BYTES))
    bounds = [size * part // count for part in range(count + 1)]
    return [(a, b) for a, b in itertools.pairwise(bounds) if a < b]
