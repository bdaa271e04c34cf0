from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoint.host_array import HUGE_PAGE, empty_pages


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("shape", [(), (0, 5), (3, 4), (1100, 1024), (HUGE_PAGE,)])
def test_it_is_an_array_like_any_other(shape: tuple[int, ...], dtype: Any) -> None:
    array = empty_pages(shape, dtype)
    assert (array.shape, array.dtype) == (shape, dtype)
    array[...] = 3
    assert (array == 3).all()


def test_a_large_one_begins_at_a_page() -> None:
    assert empty_pages((HUGE_PAGE,), np.int8).ctypes.data % 4096 == 0
