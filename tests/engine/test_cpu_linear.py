"""The CPU's matmuls against a float64 oracle, and bit for bit against themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu import linear as cpu
from engine.kernels.cpu import native
from engine.kernels.interface import Linear, UnsupportedShape

try:
    NATIVE: ModuleType = native.load()
except native.NoNativeKernels as error:
    pytest.skip(str(error), allow_module_level=True)

DTYPES = {np.dtype(np.float32): 1e-5, np.dtype(ml_dtypes.bfloat16): 1e-2}
"""Each dtype, and the error relative to the largest magnitude of a row."""
LAYERS = 2
ISAS = [*NATIVE.instruction_sets(), "amx_emulated"]
"""Those of this processor, and the loop of AMX over emulated tiles."""

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _restore_switches() -> Iterator[None]:
    yield
    NATIVE.use_instruction_set(NATIVE.instruction_sets()[0])
    NATIVE.limit_threads(0)


def rows_of(seed: int, rows: int, inputs: int, dtype: np.dtype) -> np.ndarray:
    """Inputs whose products with `matrices` are about 1."""
    return (normal(seed, (rows, inputs), np.dtype(np.float32)) / inputs**0.5).astype(dtype)


def normal(seed: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def matrices(seed: int, features: int, inputs: int, dtype: np.dtype) -> np.ndarray:
    """[LAYERS, features, inputs], as a checkpoint has them."""
    return normal(seed, (LAYERS, features, inputs), dtype)


def packed(weights: np.ndarray, bias: np.ndarray | None = None) -> Linear:
    matrix = jnp.asarray(np.stack([cpu.pack_linear(weight) for weight in weights]))
    return Linear(matrix, None if bias is None else jnp.asarray(bias), weights.shape[1])


def on_each_isa(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """The result of each instruction set, compiled once."""
    compiled = jax.jit(function)
    for isa in ISAS:
        NATIVE.use_instruction_set(isa)
        yield jax.block_until_ready(compiled(*args))


def product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ weight.astype(np.float64).T


def check(result: Any, expected: np.ndarray, live: int, tolerance: float) -> None:
    error = np.abs(np.asarray(result[:live]).astype(np.float64) - expected[:live])
    # A row may cancel out to almost nothing; the terms of its sums are still about 1 together.
    largest = np.abs(expected[:live]).max(axis=1, initial=1.0, keepdims=True)
    assert (error <= tolerance * largest).all()


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(rows, live, inputs); inputs are even."""
    rows = draw(st.integers(1, 70))
    return rows, draw(st.integers(0, rows)), 2 * draw(st.integers(1, 330))


@each_dtype
@settings(max_examples=40, deadline=None)
@given(
    size=sizes(),
    features=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    layer=st.integers(0, LAYERS - 1),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    odd=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear(
    dtype: np.dtype,
    size: tuple[int, int, int],
    features: list[int],
    layer: int,
    has_bias: bool,
    has_residual: bool,
    odd: bool,
    seed: int,
) -> None:
    rows, live, inputs = size
    inputs -= odd and dtype == np.float32
    x = rows_of(seed, rows, inputs, dtype)
    x[live:] = np.nan
    residual = None
    if has_residual:
        features = features[:1]
        residual = normal(seed + 1, (rows, features[0]), dtype)
        residual[live:] = np.nan
    weights = [matrices(seed + i, n, inputs, dtype) for i, n in enumerate(features)]
    biases = [
        normal(seed + i, (LAYERS, n), dtype) if has_bias else None for i, n in enumerate(features)
    ]

    operands = tuple(packed(w, b) for w, b in zip(weights, biases, strict=True))
    for results in on_each_isa(cpu.linear, x, operands, layer, live, residual):
        for result, weight, bias in zip(results, weights, biases, strict=True):
            assert result.dtype == dtype
            expected = product(x, weight[layer])
            if bias is not None:
                expected += bias[layer].astype(np.float64)
            if residual is not None:
                expected += residual.astype(np.float64)
            check(result, expected, live, DTYPES[dtype])


@each_dtype
@settings(max_examples=20, deadline=None)
@given(
    size=sizes(),
    features=st.integers(1, 300),
    layer=st.integers(0, LAYERS - 1),
    has_bias=st.booleans(),
)
def test_gated_linear(
    dtype: np.dtype,
    size: tuple[int, int, int],
    features: int,
    layer: int,
    has_bias: bool,
) -> None:
    rows, live, inputs = size
    x = rows_of(0, rows, inputs, dtype)
    x[live:] = np.nan
    gate, up = (matrices(seed, features, inputs, dtype) for seed in (1, 2))
    bias = normal(3, (LAYERS, features), dtype) if has_bias else None

    gated = product(x, gate[layer]) + (0 if bias is None else bias[layer].astype(np.float64))
    expected = gated / (1 + np.exp(-gated)) * product(x, up[layer])
    for result in on_each_isa(cpu.gated_linear, x, packed(gate, bias), packed(up), layer, live):
        assert result.dtype == dtype
        check(result, expected, live, DTYPES[dtype])


@each_dtype
def test_logits_are_float32(dtype: np.dtype) -> None:
    head, hidden = matrices(0, 777, 96, dtype)[0], rows_of(1, 5, 96, dtype)
    linear = Linear(cpu.pack_head(head), None, 777)
    for result in on_each_isa(cpu.logits, hidden, linear, 4):
        assert result.dtype == jnp.float32
        check(result, product(hidden, head), 4, 1e-5)


@each_dtype
def test_embed_gathers_rows_of_the_head(dtype: np.dtype) -> None:
    head = matrices(0, 777, 96, dtype)[0]
    tokens = np.array([0, 776, 31, 32, 500], np.int32)
    rows = cpu.embed(Linear(jnp.asarray(cpu.pack_head(head)), None, 777), jnp.asarray(tokens))
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, head[tokens])


@each_dtype
@pytest.mark.parametrize("inputs", [54, 600])
def test_rows_do_not_depend_on_their_batch(dtype: np.dtype, inputs: int) -> None:
    x = rows_of(0, 300, inputs, dtype)
    residual = normal(1, (300, 290), dtype)
    gate, up = (packed(matrices(seed, 290, inputs, dtype)) for seed in (2, 3))
    head = Linear(up.matrix[0], None, 290)

    def every_kind(x: Any, residual: Any) -> tuple[Any, ...]:
        live = x.shape[0]
        return (
            *cpu.linear(x, (gate, up), 1, live),
            *cpu.linear(x, (up,), 0, live, residual),
            cpu.gated_linear(x, gate, up, 1, live),
            cpu.gated_linear(x, gate, up, 0, live, "gelu_tanh"),
            cpu.logits(x, head, live, soft_cap=2.0),
        )

    compiled = jax.jit(every_kind)

    def bits_of(rows: slice) -> np.ndarray:
        results = compiled(x[rows], residual[rows])
        return np.concatenate([np.asarray(result).view(np.uint8) for result in results], axis=1)

    for isa in ISAS:
        NATIVE.use_instruction_set(isa)
        alone = np.concatenate([bits_of(slice(row, row + 1)) for row in range(300)])
        for threads in (1, 2):
            NATIVE.limit_threads(threads)
            for count in (1, 2, 7, 16, 64, 300):
                np.testing.assert_array_equal(bits_of(slice(0, count)), alone[:count])
                np.testing.assert_array_equal(bits_of(slice(300 - count, 300)), alone[-count:])


def test_emulated_tiles_sum_in_the_order_of_the_manual() -> None:
    """Within a tile of 16 pairs the first elements and the second ones are summed apart, from 0."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    x, head = rows_of(0, 20, 600, bfloat16), matrices(1, 40, 600, bfloat16)[0]
    x[19] = 2.0**-130  # a denormal: it counts as 0

    def chain(columns: range) -> np.ndarray:
        """A product of bfloat16 is exact in float32: this rounds like a chain of FMAs."""
        sums = np.zeros((20, 40), np.float32)
        for k in columns:
            sums += np.outer(x[:, k].astype(np.float32), head[:, k].astype(np.float32))
        return sums

    expected = np.zeros((20, 40), np.float32)
    for tile in range(0, 600, 32):
        end = min(tile + 32, 600)
        expected += chain(range(tile, end, 2)) + chain(range(tile + 1, end, 2))
    expected[19] = 0

    NATIVE.use_instruction_set("amx_emulated")
    result = cpu.logits(x, Linear(jnp.asarray(cpu.pack_head(head)), None, 40), 20)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_passes_the_check_at_start(isa: str) -> None:
    assert NATIVE.self_check(isa)
    NATIVE.use_instruction_set(isa)
    assert NATIVE.instruction_set() == isa


def test_emulated_tiles_are_never_chosen_by_themselves() -> None:
    assert "amx_emulated" not in NATIVE.instruction_sets()


def test_amx_is_offered_only_where_the_processor_has_it() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    has = {"amx_tile", "amx_bf16", "avx512_bf16"} <= set(flags)
    assert has or "amx" not in NATIVE.instruction_sets()


@pytest.mark.parametrize("switch", [NATIVE.use_instruction_set, NATIVE.self_check])
def test_unknown_instruction_sets_are_refused(switch: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="'sse' does not run on this processor"):
        switch("sse")


@each_dtype
@settings(max_examples=20, deadline=None)
@given(features=st.integers(1, 100), half=st.integers(1, 40))
def test_packing_moves_every_element_and_pads_with_zeros(
    dtype: np.dtype, features: int, half: int
) -> None:
    weight = normal(0, (features, 2 * half), dtype)
    matrix = cpu.pack_linear(weight)
    panels = -(-features // cpu.PANEL)
    pair = 2 if dtype == ml_dtypes.bfloat16 else 1
    steps = matrix.reshape(panels, 2 * half // pair, cpu.PANEL, pair)
    unpacked = steps.transpose(0, 2, 1, 3).reshape(panels * cpu.PANEL, 2 * half)
    np.testing.assert_array_equal(unpacked[:features], weight)
    assert not unpacked[features:].any()
    np.testing.assert_array_equal(cpu.pack_linear(np.asfortranarray(weight)), matrix)


@each_dtype
def test_a_slice_of_the_inputs_is_a_packed_weight(dtype: np.dtype) -> None:
    weight = normal(0, (40, 64), dtype)
    halves = np.split(cpu.pack_linear(weight), 2, axis=1)
    np.testing.assert_array_equal(halves[1], cpu.pack_linear(np.ascontiguousarray(weight[:, 32:])))


def test_pairs_need_an_even_number_of_inputs() -> None:
    with pytest.raises(UnsupportedShape, match=r"\[8, 5\] has an odd number of inputs"):
        cpu.pack_linear(normal(0, (8, 5), np.dtype(ml_dtypes.bfloat16)))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedShape, match="float16: the CPU kernels take float32"):
        cpu.pack_linear(np.zeros((8, 6), np.float16))


X = jnp.zeros((3, 8))
WEIGHT = Linear(jnp.zeros((LAYERS, 2, 8, 32)), None, 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((3, 7))}, "weight 0 is not packed for x"),
        ({"x": jnp.zeros((3, 8), jnp.bfloat16)}, "weight 0 is not packed for x"),
        ({"x": jnp.zeros((3, 7), jnp.bfloat16)}, "x must have an even width"),
        ({"x": jnp.zeros((3, 8), jnp.int32)}, "x must be float32 or bfloat16"),
        ({"x": jnp.zeros((1, 3, 8))}, r"x must be float32 or bfloat16 \[T, in\]"),
        ({"layer": -1}, "layer is out of range of weight 0"),
        ({"layer": LAYERS}, "layer is out of range of weight 0"),
        ({"layer": jnp.zeros(2, jnp.int32)}, "layer and live must be int32 scalars"),
        ({"live": -1}, "live is out of range"),
        ({"live": 4}, "live is out of range"),
        ({"weights": (WEIGHT, Linear(WEIGHT.matrix, None, 65))}, "weight 1 is not packed for x"),
        ({"weights": (Linear(WEIGHT.matrix[0], None, 40),)}, "weight 0 is not packed for x"),
        ({"weights": (Linear(WEIGHT.matrix, X, 40),)}, "the bias of weight 0 must be"),
        ({"residual": jnp.zeros((3, 41))}, "residual must be like the one result"),
        ({"residual": jnp.zeros((3, 40), jnp.bfloat16)}, "residual must be like the one result"),
        ({"weights": (WEIGHT, WEIGHT), "residual": jnp.zeros((3, 40))}, "residual must be like"),
    ],
)
def test_linear_refuses_wrong_operands(change: dict[str, Any], message: str) -> None:
    call = {"x": X, "weights": (WEIGHT,), "layer": 0, "live": 3, "residual": None} | change
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*linear: {message}"):
        jax.block_until_ready(cpu.linear(**call))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": Linear(WEIGHT.matrix[:, :1], None, 40)}, "gate is not packed for x"),
        ({"up": Linear(WEIGHT.matrix[:1], None, 40), "layer": 1}, "layer is out of range of up"),
        ({"up": Linear(WEIGHT.matrix, X, 40)}, "the bias of up must be"),
        ({"live": 4}, "live is out of range"),
        ({"activation": "relu"}, "there is no activation relu"),
    ],
)
def test_gated_linear_refuses_wrong_operands(change: dict[str, Any], message: str) -> None:
    call = {"x": X, "gate": WEIGHT, "up": WEIGHT, "layer": 0, "live": 3} | change
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"gated_linear: {message}"):
        jax.block_until_ready(cpu.gated_linear(**call))
