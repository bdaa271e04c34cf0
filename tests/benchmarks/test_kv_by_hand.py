"""What is moved by hand arrives: the limit of the device transport is one of work that was done."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.kv_by_hand import ByHand
from engine.kernels.reference import ReferenceKernels


@pytest.mark.parametrize("chunk_tokens", [1, 5, 7, 20])
def test_kv_moved_by_hand_arrives(chunk_tokens: int) -> None:
    rng = np.random.default_rng(0)
    source, target = (rng.permutation(32)[:20].astype(np.int32) for _ in range(2))
    by_hand = ByHand(ReferenceKernels("cpu"), (3, 32, 2, 4), source, target)
    with pytest.raises(RuntimeError, match="has not arrived"):
        by_hand.check()
    assert by_hand.run(chunk_tokens) > 0
    by_hand.check()
    with pytest.raises(RuntimeError, match="has not arrived"):  # nothing has moved since
        by_hand.check()
