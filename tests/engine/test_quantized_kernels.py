"""Weights of int8: made exactly, and multiplied as the matrix that they stand for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.interface import Kernels, Linear
from engine.kernels.quantized import NotFinite, Quantized, quantize, take_rows

TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(ml_dtypes.bfloat16): 1e-2}
LAYERS = 2

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def stands_for(matrix: Quantized) -> np.ndarray:
    return wide(matrix.values) * wide(matrix.scales)[:, None]


def linear_of(kernels: Kernels, layers: list[Quantized], bias: np.ndarray | None = None) -> Linear:
    values = np.stack([kernels.pack_linear(layer.values, 1) for layer in layers])
    scales = np.stack([layer.scales for layer in layers])
    matrix = Quantized(jnp.asarray(values), jnp.asarray(scales), layers[0].dtype)
    return Linear(matrix, bias, scales.shape[1])


def head_of(kernels: Kernels, matrix: Quantized) -> Linear:
    values = jnp.asarray(kernels.pack_head(matrix.values, 1))
    head = Quantized(values, jnp.asarray(matrix.scales), matrix.dtype)
    return Linear(head, None, len(matrix.scales))


def assert_near(found: Any, wanted: np.ndarray, live: int, dtype: np.dtype) -> None:
    error = np.abs(wide(np.asarray(found)[:live]) - wanted[:live])
    # A row's sums may cancel; their terms are still about 1 together.
    largest = np.abs(wanted[:live]).max(axis=1, initial=1.0, keepdims=True)
    assert (error <= TOLERANCE[dtype] * largest).all(), error.max(initial=0)


# ---- from a checkpoint's tensor ----


@settings(max_examples=40, deadline=None)
@given(
    features=st.sampled_from([1, 7, 1023, 1025, 2048]),
    inputs=st.integers(1, 40),
    stored=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    power=st.integers(-6, 4),
)
def test_each_output_has_its_own_scale(
    features: int, inputs: int, stored: type, power: int
) -> None:
    weight = (normal(0, features, inputs) * 10.0**power).astype(stored)
    weight[features // 2] = 0
    found = quantize(weight, np.dtype(np.float32))
    scales = np.abs(weight.astype(np.float32)).max(axis=1) / np.float32(127)
    with np.errstate(invalid="ignore"):
        values = np.rint(weight.astype(np.float32) / scales[:, None])
    values[scales == 0] = 0
    assert found.scales.dtype == np.float32
    assert found.values.dtype == np.int8
    np.testing.assert_array_equal(found.scales, scales)
    np.testing.assert_array_equal(found.values, values)
    assert (np.abs(values[scales > 0]).max(axis=1) == 127).all()


def test_denormal_weights_are_no_trouble() -> None:
    weight = np.array([[1.4e-45, 0.0], [2.5e-43, -2.5e-43]], np.float32)
    found = quantize(weight, np.dtype(np.float32))
    np.testing.assert_allclose(stands_for(found), weight, atol=2e-43)
    assert np.abs(found.values.astype(int)).max() <= 127


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_have_no_scale(poison: float) -> None:
    weight = normal(0, 1030, 8)
    weight[1029, 3] = poison
    with pytest.raises(NotFinite, match="NaN or infinity"):
        quantize(weight, np.dtype(np.float32))


@each_dtype
def test_rows_are_rounded_once_to_the_activations(dtype: np.dtype) -> None:
    matrix = quantize(normal(0, 50, 8), dtype)
    rows = take_rows(matrix, jnp.array([49, 0, 3]))
    wanted = matrix.values.astype(np.float32) * matrix.scales[:, None]
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, wanted[[49, 0, 3]].astype(dtype))


# ---- beside float64 ----


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(rows, live, inputs); a tile of rows, more of them, and inputs beyond a depth."""
    rows = draw(st.sampled_from([1, 2, 12, 13, 40, 300]))
    return rows, draw(st.sampled_from([rows, rows // 2])), 2 * draw(st.integers(1, 300))


@each_dtype
@settings(max_examples=12, deadline=None)
@given(
    size=sizes(),
    features=st.integers(1, 150),
    layer=st.integers(0, LAYERS - 1),
    biased=st.booleans(),
    has_residual=st.booleans(),
    is_wide=st.booleans(),
)
def test_linear(
    kernels: Kernels,
    dtype: np.dtype,
    size: tuple[int, int, int],
    features: int,
    layer: int,
    biased: bool,
    has_residual: bool,
    is_wide: bool,
) -> None:
    rows, live, inputs = size
    x = (normal(0, rows, inputs) / inputs**0.5).astype(dtype)
    x[live:] = np.nan
    layers = [quantize(normal(1 + n, features, inputs), dtype) for n in range(LAYERS)]
    bias = normal(3, LAYERS, features).astype(dtype) if biased else None
    residual = None
    if has_residual:
        residual = normal(4, rows, features).astype(dtype)
        residual[live:] = np.nan
    operands = (linear_of(kernels, layers, bias),)
    compiled = jax.jit(kernels.linear, static_argnames="wide")
    (found,) = compiled(x, operands, np.int32(layer), np.int32(live), residual, wide=is_wide)
    wanted = wide(x) @ stands_for(layers[layer]).T
    wanted += 0 if bias is None else wide(bias[layer])
    wanted += 0 if residual is None else wide(residual)
    assert found.dtype == (np.float32 if is_wide else dtype)
    assert_near(found, wanted, live, dtype)


@each_dtype
@settings(max_examples=8, deadline=None)
@given(size=sizes(), features=st.integers(1, 150), biased=st.booleans())
def test_gated_linear(
    kernels: Kernels, dtype: np.dtype, size: tuple[int, int, int], features: int, biased: bool
) -> None:
    rows, live, inputs = size
    x = (normal(0, rows, inputs) / inputs**0.5).astype(dtype)
    x[live:] = np.nan
    gate, up = (quantize(normal(seed, features, inputs), dtype) for seed in (1, 2))
    bias = normal(3, 1, features).astype(dtype) if biased else None
    opened = wide(x) @ stands_for(gate).T + (0 if bias is None else wide(bias[0]))
    wanted = opened / (1 + np.exp(-opened)) * (wide(x) @ stands_for(up).T)
    operands = linear_of(kernels, [gate], bias), linear_of(kernels, [up])
    found = jax.jit(kernels.gated_linear)(x, *operands, np.int32(0), np.int32(live))
    assert found.dtype == dtype
    assert_near(found, wanted, live, dtype)


@each_dtype
def test_the_head_gives_logits_and_rows(kernels: Kernels, dtype: np.dtype) -> None:
    matrix = quantize(normal(0, 777, 96), dtype)
    head = head_of(kernels, matrix)
    hidden = (normal(1, 5, 96) / 96**0.5).astype(dtype)
    found = jax.jit(kernels.logits)(hidden, head, np.int32(5))
    assert found.dtype == np.float32
    assert_near(found, wide(hidden) @ stands_for(matrix).T, 5, np.dtype(np.float32))
    tokens = np.array([0, 776, 31, 32, 500], np.int32)
    rows = jax.jit(kernels.embed)(head, tokens)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, take_rows(matrix, tokens))


# ---- bit for bit ----


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


@each_dtype
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_int8_is_multiplied_as_the_same_values_unquantized(
    cpu: Kernels, dtype: np.dtype, rows: int
) -> None:
    """Of scales 1: the values are exact in either type, and summed in the same order."""
    values = np.random.default_rng(0).integers(-127, 128, (90, 600), np.int8)
    x = normal(1, rows, 600).astype(dtype)
    matrix = Quantized(values, np.ones(90, np.float32), dtype)
    plain = jnp.asarray(cpu.pack_linear(values.astype(dtype), 1))[None]
    linear = jax.jit(cpu.linear)
    (found,) = linear(x, (linear_of(cpu, [matrix]),), np.int32(0), np.int32(rows))
    (wanted,) = linear(x, (Linear(plain, None, 90),), np.int32(0), np.int32(rows))
    np.testing.assert_array_equal(bits(found), bits(wanted))


@each_dtype
@pytest.mark.parametrize("inputs", [54, 600])
def test_rows_do_not_depend_on_their_batch(
    cpu: Kernels, native: ModuleType, dtype: np.dtype, inputs: int
) -> None:
    x, residual = normal(0, 300, inputs).astype(dtype), normal(1, 300, 290).astype(dtype)
    layers = [quantize(normal(2 + n, 290, inputs), dtype) for n in range(LAYERS)]
    gate, up = linear_of(cpu, layers), linear_of(cpu, layers[::-1], residual[:LAYERS])

    @jax.jit
    def every_kind(x: Any, residual: Any) -> tuple[Any, ...]:
        live = x.shape[0]
        return (
            *cpu.linear(x, (gate, up), 1, live),
            *cpu.linear(x, (up,), 0, live, residual),
            cpu.gated_linear(x, gate, up, 1, live),
        )

    def bits_of(rows: slice) -> np.ndarray:
        return np.stack([bits(result) for result in every_kind(x[rows], residual[rows])], axis=1)

    alone = np.concatenate([bits_of(slice(row, row + 1)) for row in range(300)])
    for threads in (1, 2):
        native.limit_threads(threads)
        for count in (1, 2, 7, 16, 64, 300):
            np.testing.assert_array_equal(bits_of(slice(0, count)), alone[:count])
            np.testing.assert_array_equal(bits_of(slice(300 - count, 300)), alone[-count:])


# ---- wrong calls ----

X = np.zeros((3, 8), np.float32)
VALUES, SCALES = np.zeros((1, 2, 8, 32), np.int8), np.zeros((1, 40), np.float32)
PLAIN = Linear(np.zeros((1, 2, 8, 32), np.float32), None, 40)


def quantized(values: np.ndarray = VALUES, scales: np.ndarray = SCALES) -> Linear:
    return Linear(Quantized(values, scales, np.dtype(np.float32)), None, 40)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((quantized(VALUES[:, :1]),), "weight 0 is not packed for x"),
        ((quantized(VALUES[:, :, :6]),), "weight 0 is not packed for x"),
        ((quantized(VALUES.astype(np.int16)),), "weight 0 is not packed for x"),
        ((quantized(scales=SCALES[:, :39]),), "the scales of weight 0 must be float32"),
        ((quantized(scales=SCALES[0]),), "the scales of weight 0 must be float32"),
        ((quantized(scales=SCALES.astype(np.int32)),), "the scales of weight 0 must be float32"),
        ((quantized(PLAIN.matrix),), "the scales of weight 0 must be float32"),
        ((quantized(), PLAIN), "some weights alone are int8"),
    ],
)
def test_wrong_operands_are_refused(
    cpu: Kernels, weights: tuple[Linear, ...], message: str
) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*linear: {message}"):
        jax.block_until_ready(cpu.linear(jnp.asarray(X), weights, 0, 3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="gate or up alone is int8"):
        jax.block_until_ready(cpu.gated_linear(jnp.asarray(X), quantized(), PLAIN, 0, 3))
