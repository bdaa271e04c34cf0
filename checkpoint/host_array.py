"""Large arrays on pages of their own, outside of the allocator's heap."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

HUGE_PAGE = 1 << 21


def empty_pages(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array like np.empty's; a large one has zeros and begins at a page.

    Its memory goes back to the system with it, which the allocator would keep; jax takes it over
    on CPU as it is, aligned as it is; and the system is asked for huge pages, which take a
    fraction of the time to be touched first.
    """
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < HUGE_PAGE:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)
