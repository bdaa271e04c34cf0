"""Norm, matmuls and head of every implementation, against NumPy in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.interface import Activation, Kernels, Linear

TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(ml_dtypes.bfloat16): 1e-2}
LAYERS = 2


@dataclass(frozen=True)
class Case:
    rows: int
    padding: int
    into: int
    out: int
    dtype: np.dtype
    seed: int

    @property
    def live(self) -> int:
        return self.rows - self.padding

    def draw(self, *shape: int) -> np.ndarray:
        return np.random.default_rng([self.seed, *shape]).standard_normal(shape).astype(self.dtype)

    @property
    def x(self) -> np.ndarray:
        """Products with drawn weights are about 1. Padding rows are NaN: they reach no other."""
        x = self.draw(self.rows, self.into) * np.asarray(self.into**-0.5, self.dtype)
        x[self.live :] = np.nan
        return x


cases = st.builds(
    lambda rows, padding, into, out, dtype, seed: Case(
        rows, min(padding, rows), 2 * into, out, dtype, seed
    ),
    rows=st.sampled_from([1, 2, 3, 12, 13, 40, 300]),
    padding=st.integers(0, 4),
    into=st.integers(1, 150),
    out=st.integers(1, 150),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
every_case = settings(max_examples=15, deadline=None)


def wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def assert_near(case: Case, found: jax.Array, wanted: np.ndarray, terms: np.ndarray) -> None:
    """Within the tolerance of the largest that a row's sums run through."""
    assert found.shape == (case.rows, wanted.shape[1])
    error = np.abs(wide(np.asarray(found)[: case.live]) - wanted[: case.live])
    assert (error <= TOLERANCE[case.dtype] * terms[: case.live]).all(), error.max(initial=0)


def packed(kernels: Kernels, weights: np.ndarray, biases: np.ndarray | None = None) -> Linear:
    """Weights [layers, out, in]."""
    matrix = np.stack([kernels.pack_linear(weight, 1) for weight in weights])
    return Linear(jnp.array(matrix), biases, weights.shape[1])


def largest(wanted: np.ndarray) -> np.ndarray:
    """Of each row; sums of a few terms may cancel, so at least 1."""
    return np.maximum(np.abs(wanted).max(axis=1, keepdims=True), 1)


def normed(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


@every_case
@given(case=cases, is_wide=st.booleans())
def test_rms_norm(kernels: Kernels, case: Case, is_wide: bool) -> None:
    """A weight of float32 may need digits that bfloat16 has not: Gemma's 1 + w."""
    weight = 1 + case.draw(LAYERS, case.into).astype(np.float32) / 64
    weight = weight if is_wide else weight.astype(case.dtype)
    norm = jax.jit(kernels.rms_norm, static_argnums=4)
    found = norm(case.x, weight, np.int32(1), np.int32(case.live), 1e-5)
    wanted = normed(wide(case.x), 1e-5) * wide(weight)[1]
    assert found.dtype == case.dtype
    assert_near(case, found, wanted, np.abs(wanted).max(axis=1, keepdims=True))


@every_case
@given(case=cases, heads=st.integers(1, 5), weighed=st.sampled_from([None, "x", "float32"]))
def test_head_norm(kernels: Kernels, case: Case, heads: int, weighed: str | None) -> None:
    x = case.draw(case.rows, heads, case.into)
    x[case.live :] = np.nan
    weight = None
    if weighed is not None:
        weight = case.draw(LAYERS, case.into).astype(case.dtype if weighed == "x" else weighed)
    norm = jax.jit(kernels.head_norm, static_argnums=4)
    found = norm(x, weight, np.int32(1), np.int32(case.live), 1e-6)
    wanted = normed(wide(x), 1e-6)
    wanted = (wanted if weight is None else wanted * wide(weight)[1]).reshape(case.rows, -1)
    assert (found.dtype, found.shape) == (case.dtype, x.shape)
    assert_near(case, found.reshape(wanted.shape), wanted, largest(wanted))


@every_case
@given(case=cases, biased=st.booleans(), is_wide=st.booleans())
def test_linear_with_residual(kernels: Kernels, case: Case, biased: bool, is_wide: bool) -> None:
    weights = case.draw(LAYERS, case.out, case.into)
    bias = case.draw(LAYERS, case.out) if biased else None
    residual = case.draw(case.rows, case.out)
    linear = jax.jit(kernels.linear, static_argnames="wide")
    live, weight = np.int32(case.live), packed(kernels, weights, bias)
    (found,) = linear(case.x, (weight,), np.int32(1), live, residual, wide=is_wide)
    wanted = wide(case.x) @ wide(weights[1]).T + wide(residual)
    if bias is not None:
        wanted += wide(bias)[1]
    assert found.dtype == (np.float32 if is_wide else case.dtype)
    assert_near(case, found, wanted, largest(wanted))


def activated(x: np.ndarray, activation: Activation) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@every_case
@given(case=cases, activation=st.sampled_from(["silu", "gelu_tanh"]))
def test_gated_linear(kernels: Kernels, case: Case, activation: Activation) -> None:
    gate, up = (case.draw(LAYERS, case.out, case.into + n)[:, :, n:] for n in (0, 1))
    operands = packed(kernels, gate), packed(kernels, up), np.int32(0), np.int32(case.live)
    found = jax.jit(kernels.gated_linear, static_argnums=5)(case.x, *operands, activation)
    opened, raised = (wide(case.x) @ wide(weights[0]).T for weights in (gate, up))
    wanted = activated(opened, activation) * raised
    assert found.dtype == case.dtype
    assert_near(case, found, wanted, largest(wanted))


@every_case
@given(case=cases, soft_cap=st.sampled_from([None, 0.5, 30.0]))
def test_the_head_gives_logits_and_rows(
    kernels: Kernels, case: Case, soft_cap: float | None
) -> None:
    weight = case.draw(case.out, case.into)
    head = Linear(jnp.array(kernels.pack_head(weight, 1)), None, case.out)
    logits = jax.jit(kernels.logits, static_argnames="soft_cap")
    found = logits(case.x, head, np.int32(case.live), soft_cap=soft_cap)
    wanted = wide(case.x) @ wide(weight).T
    if soft_cap is not None:
        wanted = soft_cap * np.tanh(wanted / soft_cap)
    assert found.dtype == np.float32
    assert_near(case, found, wanted, largest(wanted))
    tokens = np.arange(2 * case.out, dtype=np.int32) % case.out
    assert np.array_equal(wide(jax.jit(kernels.embed)(head, tokens)), wide(weight)[tokens])


@every_case
@given(case=cases, heads=st.integers(1, 5), rest=st.integers(0, 40))
def test_rotate_turns_the_pairs_that_have_angles(
    kernels: Kernels, case: Case, heads: int, rest: int
) -> None:
    half = case.into // 2
    x = [case.draw(case.rows, n, case.into + 2 * rest) for n in (heads, 1)]
    angles = np.random.default_rng(case.seed).uniform(-3, 3, (20, half))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions = np.arange(case.rows, dtype=np.int32) % 20
    turn = np.exp(1j * angles[positions])[:, None, :]
    rotated = jax.jit(kernels.rotate)(*x, table, positions, np.int32(case.live))
    for before, after in zip(x, rotated, strict=True):
        before = wide(before)
        turned = (before[..., :half] + 1j * before[..., half : 2 * half]) * turn
        wanted = np.concatenate([turned.real, turned.imag, before[..., 2 * half :]], axis=-1)
        assert after.dtype == case.dtype
        wanted = wanted.reshape(case.rows, -1)
        assert_near(case, after.reshape(wanted.shape), wanted, largest(wanted))
        passed = np.asarray(after)[: case.live, :, 2 * half :]
        np.testing.assert_array_equal(wide(passed), before[: case.live, :, 2 * half :])


ROWS, SCALE = jnp.zeros((3, 8), jnp.bfloat16), jnp.zeros((LAYERS, 8), jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": ROWS.astype(jnp.int32)}, "x must be float32 or bfloat16"),
        ({"x": ROWS[0]}, "x must be float32 or bfloat16 .rows, width."),
        ({"x": ROWS.astype(jnp.float32)}, "weight must be .* in float32 or the dtype of x"),
        ({"weight": SCALE[:, :6]}, "weight must be .layers, width."),
        ({"weight": SCALE[0]}, "weight must be .layers, width."),
        ({"weight": SCALE.astype(jnp.float16)}, "weight must be .layers, width."),
        ({"layer": LAYERS}, "layer or live is out of range"),
        ({"layer": -1}, "layer or live is out of range"),
        ({"live": 4}, "layer or live is out of range"),
        ({"weight": None, "live": -1}, "layer or live is out of range"),
    ],
)
def test_wrong_norms_are_refused(cpu: Kernels, change: dict[str, Any], message: str) -> None:
    call = {"x": ROWS, "weight": SCALE, "layer": 0, "live": 3, "eps": 1e-5} | change
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*rms_norm: {message}"):
        jax.block_until_ready(cpu.rms_norm(**call))
