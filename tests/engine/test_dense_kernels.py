"""Norm, matmuls and head of every implementation, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.choose import KernelsUnavailable, choose_kernels
from engine.kernels.cpu import native
from engine.kernels.interface import Kernels, Linear

TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(ml_dtypes.bfloat16): 1e-2}
LAYERS = 2


@pytest.fixture(scope="module", params=["reference", "amx", "avx512bf16", "avx512", "avx2"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    if request.param == "reference":
        yield choose_kernels("cpu", "reference")
        return
    try:
        chosen = choose_kernels("cpu", "cpu")
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    module = native.load()
    if request.param not in module.instruction_sets():
        pytest.skip(f"this processor does not run {request.param}")
    module.use_instruction_set(request.param)
    yield chosen
    module.use_instruction_set(module.instruction_sets()[0])


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


@every_case
@given(case=cases)
def test_rms_norm(kernels: Kernels, case: Case) -> None:
    weight = case.draw(LAYERS, case.into)
    norm = jax.jit(kernels.rms_norm, static_argnums=4)
    found = norm(case.x, weight, np.int32(1), np.int32(case.live), 1e-5)
    x = wide(case.x)
    wanted = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * wide(weight)[1]
    assert found.dtype == case.dtype
    assert_near(case, found, wanted, np.abs(wanted).max(axis=1, keepdims=True))


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


@every_case
@given(case=cases)
def test_gated_linear(kernels: Kernels, case: Case) -> None:
    gate, up = (case.draw(LAYERS, case.out, case.into + n)[:, :, n:] for n in (0, 1))
    found = jax.jit(kernels.gated_linear)(
        case.x, packed(kernels, gate), packed(kernels, up), np.int32(0), np.int32(case.live)
    )
    opened, raised = (wide(case.x) @ wide(weights[0]).T for weights in (gate, up))
    wanted = opened / (1 + np.exp(-opened)) * raised
    assert found.dtype == case.dtype
    assert_near(case, found, wanted, largest(wanted))


@every_case
@given(case=cases)
def test_the_head_gives_logits_and_rows(kernels: Kernels, case: Case) -> None:
    weight = case.draw(case.out, case.into)
    head = Linear(jnp.array(kernels.pack_head(weight, 1)), None, case.out)
    found = jax.jit(kernels.logits)(case.x, head, np.int32(case.live))
    wanted = wide(case.x) @ wide(weight).T
    assert found.dtype == np.float32
    assert_near(case, found, wanted, largest(wanted))
    tokens = np.arange(2 * case.out, dtype=np.int32) % case.out
    assert np.array_equal(wide(jax.jit(kernels.embed)(head, tokens)), wide(weight)[tokens])
