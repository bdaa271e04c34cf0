"""Both samplers' biases against a NumPy oracle."""

# ruff: noqa: F811 - a test that takes the fixture of another module names it again

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from engine import sampling
from engine.sampling import SlotBiases
from tests.engine.test_sampling import (
    Draw,
    counts_row,
    draw,  # noqa: F401 (a fixture)
    penalized,
    row_params,
    softmax,
)


@pytest.mark.parametrize("with_penalties", [False, True], ids=["plain", "penalized"])
def test_biases_are_added_before_penalties(draw: Draw, with_penalties: bool) -> None:
    """As an oracle adds them: greedy, drawn, and what the row does not use left out."""
    rng = np.random.default_rng(8)
    rows, vocab, entries = 60, 64, 7
    logits = rng.standard_normal((rows, vocab)) * 2
    ids = np.array([rng.permutation(vocab)[:entries] for _ in range(rows)], np.int32)
    values = rng.choice([-100, -2, -0.5, 0.5, 2, 100, -np.inf], (rows, entries)).astype(np.float32)
    used, slots = rng.integers(0, entries + 1, rows), rng.permutation(rows)
    own: dict[str, Any] = {"biases": used, "bias_slot": slots}
    wanted = logits.copy()
    for row, slot in enumerate(slots):
        wanted[row, ids[slot, : used[row]]] += values[slot, : used[row]]
    counts = np.zeros((rows, vocab), np.int32)
    if with_penalties:
        penalties = {"presence": 0.4, "frequency": 0.2, "repetition": 1.5}
        own |= penalties | {"slot": slots}
        outputs = [rng.integers(0, vocab, 30).tolist() for _ in range(rows)]
        for row, slot in enumerate(slots):
            counts[slot] = counts_row([], outputs[row], vocab)
            wanted[row] = penalized_by(wanted[row], outputs[row], penalties)
    biases = SlotBiases(ids, values)
    params = row_params(rows, scored=True, **own)
    sampled, _ = draw(logits, params, counts, biases)
    assert sampled.tokens.tolist() == wanted.argmax(axis=1).tolist()
    assert sampled.tokens.tolist() != logits.argmax(axis=1).tolist()
    for row, token in enumerate(sampled.tokens):  # what is reported is the model's own
        own_logprob = np.log(softmax(logits[row]))[token]
        np.testing.assert_allclose(sampled.logprobs[row], own_logprob, atol=1e-5)

    noise = {"temperature": 1.0, "seed": np.arange(rows)}
    drawn = draw(logits, row_params(rows, **own, **noise), counts, biases)[0].tokens
    oracle = draw(wanted, row_params(rows, **noise))[0].tokens
    assert drawn.tolist() == oracle.tolist()
    banned = [
        token
        for row, slot in enumerate(slots)
        for token in ids[slot, : used[row]][values[slot, : used[row]] == -np.inf]
        if token == drawn[row]
    ]
    assert not banned


def penalized_by(logits: np.ndarray, output: list[int], penalties: dict[str, float]) -> np.ndarray:
    return penalized(logits, [], output, **penalties)


def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it(draw: Draw) -> None:
    logits = np.random.default_rng(3).standard_normal((2, 64)) * 4
    best = int(logits[1].argmax())
    biases = SlotBiases(
        np.array([[11, 0, 0], [best, 0, 0]], np.int32),
        np.array([[100, 0, 0], [-100, 0, 0]], np.float32),
    )
    params = row_params(2, biases=1, bias_slot=[0, 1])
    first, second = draw(logits, params, None, biases)[0].tokens
    assert first == 11
    assert second == np.argsort(logits[1])[-2] != best


def test_load_biases_replaces_one_slot() -> None:
    before = SlotBiases(np.full((3, 4), 7, np.int32), np.ones((3, 4), np.float32))
    ids, values = np.array([5, 6, 0, 0], np.int32), np.array([-1, -np.inf, 0, 0], np.float32)
    after = jax.jit(sampling.load_biases)(before, np.int32(1), ids, values)
    assert np.array_equal(after.ids, [[7] * 4, ids, [7] * 4])
    assert np.array_equal(after.values, [[1] * 4, values, [1] * 4])
