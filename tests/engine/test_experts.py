"""Mixtures of experts of every implementation, against NumPy in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.interface import Activation, Kernels, Linear, Routing, RoutingSpec
from engine.kernels.quantized import Quantized, quantize

TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(ml_dtypes.bfloat16): 1e-2}
LAYERS, LAYER = 2, 1
# The one where a program runs at once, the other where it runs behind.
REFUSED = (ValueError, jax.errors.JaxRuntimeError)

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


# ---- which experts ----


@settings(max_examples=25, deadline=None)
@given(
    rows=st.sampled_from([1, 3, 40, 300]),
    padding=st.integers(0, 3),
    experts=st.integers(1, 70),
    top_k=st.integers(1, 8),
    gate=st.sampled_from(["softmax", "sigmoid"]),
    normalized=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 99),
)
def test_the_highest_scores_are_chosen_and_of_ties_the_lower_ids(
    kernels: Kernels,
    rows: int,
    padding: int,
    experts: int,
    top_k: int,
    gate: Any,
    normalized: bool,
    dtype: np.dtype,
    seed: int,
) -> None:
    live, top_k = max(0, rows - padding), min(top_k, experts)
    # One input of 1, so that a score is a weight, and few values, so that there are ties.
    x = np.eye(4, dtype=dtype)[np.arange(rows) % 4]
    x[live:] = np.nan
    weights = np.random.default_rng(seed).integers(-12, 13, (LAYERS, experts, 4)) / 4
    packed = np.stack([kernels.pack_linear(layer.astype(dtype), 1) for layer in weights])
    router = Linear(jnp.asarray(packed), None, experts)
    route = jax.jit(kernels.route, static_argnames="spec")
    spec = RoutingSpec(top_k, gate, normalized)
    found = route(x, router, np.int32(LAYER), np.int32(live), spec=spec)

    scores = weights[LAYER].T[np.arange(live) % 4]
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    exps = np.exp(scores)
    shares = 1 / (1 + 1 / exps) if gate == "sigmoid" else exps / exps.sum(axis=1, keepdims=True)
    wanted = np.take_along_axis(shares, chosen, axis=1)
    if normalized:
        wanted /= wanted.sum(axis=1, keepdims=True)
    assert (found.experts.dtype, found.weights.dtype) == (np.int32, np.float32)
    assert found.experts.shape == found.weights.shape == (rows, top_k)
    np.testing.assert_array_equal(found.experts[:live], chosen)
    np.testing.assert_allclose(found.weights[:live], wanted, rtol=2e-6)


def test_scores_that_are_not_numbers_are_seen(kernels: Kernels) -> None:
    x, router = np.full((2, 4), np.nan, np.float32), kernels.pack_linear(normal(0, 6, 4), 1)
    linear = Linear(jnp.asarray(router)[None], None, 6)
    found = kernels.route(x, linear, np.int32(0), np.int32(2), RoutingSpec(2))
    assert ((np.asarray(found.experts) >= 0) & (np.asarray(found.experts) < 6)).all()
    assert np.isnan(found.weights).all()


# ---- what they compute ----


@dataclass(frozen=True)
class Case:
    """Experts from `used` on get no token: their weights are NaN, and reach nothing."""

    rows: int
    padding: int
    experts: int
    used: int
    top_k: int
    hidden: int
    ffn: int
    dtype: np.dtype
    biased: bool
    seed: int

    @property
    def live(self) -> int:
        return max(0, self.rows - self.padding)

    @property
    def x(self) -> np.ndarray:
        x = (normal(self.seed, self.rows, self.hidden) * self.hidden**-0.5).astype(self.dtype)
        x[self.live :] = np.nan
        return x

    @property
    def routing(self) -> Routing:
        rng = np.random.default_rng([self.seed, 7])
        order = rng.random((self.rows, self.used)).argsort(axis=1)
        experts = order[:, : self.top_k].astype(np.int32)
        weights = rng.uniform(0.1, 1.5, experts.shape).astype(np.float32)
        experts[self.live :], weights[self.live :] = -7, np.nan
        return Routing(experts, weights)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of gate, up and down."""
        return (self.ffn, self.hidden), (self.ffn, self.hidden), (self.hidden, self.ffn)

    @property
    def weights(self) -> tuple[np.ndarray, ...]:
        """[LAYERS, experts, out, into] each, in float32, so wide that results are about 1."""
        return tuple(
            normal(self.seed + n, LAYERS, self.experts, out, into) * (into**-0.5 if n == 2 else 1)
            for n, (out, into) in enumerate(self.sizes)
        )

    def bias(self, seed: int, out: int) -> np.ndarray | None:
        if not self.biased:
            return None
        return normal(self.seed + seed, LAYERS, self.experts, out).astype(self.dtype)

    def rounded(self) -> tuple[np.ndarray, ...]:
        """The weights in the dtype of x; those of no token are NaN."""
        rounded = tuple(weight.astype(self.dtype) for weight in self.weights)
        for weight in rounded:
            weight[:, self.used :] = np.nan
        return rounded


cases = st.builds(
    lambda rows, padding, experts, unused, top_k, hidden, ffn, dtype, biased, seed: Case(
        rows, padding, experts + unused, experts, min(top_k, experts), 2 * hidden, 2 * ffn,
        dtype, biased, seed,
    ),
    rows=st.sampled_from([1, 2, 13, 40, 300]),
    padding=st.integers(0, 3),
    experts=st.integers(1, 7),
    unused=st.integers(0, 2),
    top_k=st.integers(1, 4),
    hidden=st.integers(1, 90),
    ffn=st.integers(1, 90),
    dtype=st.sampled_from(list(TOLERANCE)),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip


def stacked(kernels: Kernels, weights: np.ndarray, bias: np.ndarray | None = None) -> Linear:
    matrix = np.stack([[kernels.pack_linear(w, 1) for w in layer] for layer in weights])
    return Linear(jnp.asarray(matrix), bias, weights.shape[2])


def of_int8(kernels: Kernels, weights: np.ndarray, dtype: np.dtype) -> tuple[Linear, np.ndarray]:
    """A quantized weight, and what it stands for."""
    each = [[quantize(w, dtype) for w in layer] for layer in weights]
    values = np.stack([[kernels.pack_linear(q.values, 1) for q in layer] for layer in each])
    scales = np.stack([[q.scales for q in layer] for layer in each])
    meant = np.stack([[wide(q.values) * wide(q.scales)[:, None] for q in row] for row in each])
    matrix = Quantized(jnp.asarray(values), jnp.asarray(scales), dtype)
    return Linear(matrix, None, weights.shape[2]), meant


def activated(x: np.ndarray, activation: Activation) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def oracle(
    case: Case,
    weights: tuple[np.ndarray, ...],
    biases: tuple[np.ndarray | None, ...],
    activation: Activation,
    weigh_inputs: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """float64 [live, hidden]; and [live, 1], the largest that a row's terms add up to."""

    def times(x: np.ndarray, which: int, expert: int) -> np.ndarray:
        bias = biases[which]
        y = wide(weights[which][LAYER, expert]) @ x
        return y if bias is None else y + wide(bias[LAYER, expert])

    x, routing = case.x, case.routing
    wanted, terms = np.zeros((2, case.live, case.hidden))
    for row in range(case.live):
        for expert, weight in zip(routing.experts[row], routing.weights[row], strict=True):
            inputs = wide((x[row] * weight).astype(case.dtype) if weigh_inputs else x[row])
            h = activated(times(inputs, 0, expert), activation) * times(inputs, 1, expert)
            factor = 1 if weigh_inputs else float(weight)
            wanted[row] += factor * times(h, 2, expert)
            terms[row] += factor * np.abs(wide(weights[2][LAYER, expert])) @ np.abs(h)
    return wanted, np.maximum(np.abs(wanted), terms).max(axis=1, initial=1, keepdims=True)


def check(case: Case, found: Any, expected: tuple[np.ndarray, np.ndarray]) -> None:
    """Within the tolerance of what the rounded inputs of `down` can make."""
    wanted, largest = expected
    assert (found.dtype, found.shape) == (np.float32, (case.rows, case.hidden))
    error = np.abs(wide(np.asarray(found)[: case.live]) - wanted)
    assert (error <= TOLERANCE[case.dtype] * largest).all(), error.max(initial=0)


@partial(jax.jit, static_argnums=(0, 8, 9))
def experts(kernels: Kernels, *operands: Any) -> Any:
    return kernels.experts(*operands)


@settings(max_examples=12, deadline=None)
@given(case=cases, activation=st.sampled_from(["silu", "gelu_tanh"]), weigh_inputs=st.booleans())
def test_experts(kernels: Kernels, case: Case, activation: Activation, weigh_inputs: bool) -> None:
    weights = case.rounded()
    biases = tuple(case.bias(n, out) for n, (out, _) in enumerate(case.sizes))
    operands = (stacked(kernels, w, b) for w, b in zip(weights, biases, strict=True))
    found = experts(
        kernels, case.x, case.routing, *operands, np.int32(LAYER), np.int32(case.live),
        activation, weigh_inputs,
    )  # fmt: skip
    check(case, found, oracle(case, weights, biases, activation, weigh_inputs))


@settings(max_examples=6, deadline=None)
@given(case=cases)
def test_experts_of_int8(kernels: Kernels, case: Case) -> None:
    operands, meant = [], []
    for weight in case.weights:
        operand, stands_for = of_int8(kernels, weight, case.dtype)
        operands.append(operand)
        meant.append(stands_for)
    found = experts(
        kernels, case.x, case.routing, *operands, np.int32(LAYER), np.int32(case.live),
        "silu", False,
    )  # fmt: skip
    check(case, found, oracle(case, tuple(meant), (None,) * 3, "silu", False))


@each_dtype
def test_slices_of_the_experts_add_up(kernels: Kernels, dtype: np.dtype) -> None:
    """What two shards compute of every expert's MLP are the parts of a sum."""
    case = Case(13, 1, 5, 5, 2, 64, 96, dtype, biased=False, seed=0)
    gate, up, down = case.rounded()
    halves = slice(0, case.ffn // 2), slice(case.ffn // 2, case.ffn)
    parts = [
        experts(
            kernels, case.x, case.routing, stacked(kernels, gate[:, :, half]),
            stacked(kernels, up[:, :, half]),
            stacked(kernels, np.ascontiguousarray(down[..., half])),
            np.int32(LAYER), np.int32(case.live), "silu", False,
        )
        for half in halves
    ]  # fmt: skip
    check(case, sum(parts), oracle(case, (gate, up, down), (None,) * 3, "silu", False))


# ---- bit for bit ----


@pytest.mark.parametrize("kind", ["plain", "int8"])
@each_dtype
def test_rows_do_not_depend_on_their_batch(
    cpu: Kernels, native: ModuleType, dtype: np.dtype, kind: str
) -> None:
    """300 rows of 3 experts each are more than a block of rows, for some expert."""
    case = Case(300, 0, 4, 4, 3, 54, 290, dtype, biased=False, seed=0)
    operands = [
        stacked(cpu, weight.astype(dtype)) if kind == "plain" else of_int8(cpu, weight, dtype)[0]
        for weight in case.weights
    ]
    scores = stacked(cpu, normal(3, LAYERS, 1, 4, case.hidden).astype(dtype))
    router = Linear(scores.matrix[:, 0], None, 4)
    x = case.x

    @jax.jit
    def mixture(x: Any) -> tuple[Any, ...]:
        live = np.int32(x.shape[0])
        routing = cpu.route(x, router, LAYER, live, RoutingSpec(3, "softmax", normalized=False))
        mixed = [cpu.experts(x, routing, *operands, LAYER, live, "gelu_tanh", w) for w in (0, 1)]
        return routing.weights, *mixed

    def bits_of(rows: slice) -> np.ndarray:
        parts = [np.asarray(part).view(np.uint8) for part in mixture(x[rows])]
        return np.concatenate(parts, axis=1)

    alone = np.concatenate([bits_of(slice(row, row + 1)) for row in range(300)])
    for threads in (1, 2):
        native.limit_threads(threads)
        for count in (1, 2, 7, 64, 300):
            np.testing.assert_array_equal(bits_of(slice(0, count)), alone[:count])
            np.testing.assert_array_equal(bits_of(slice(300 - count, 300)), alone[-count:])
    native.limit_threads(0)


# ---- wrong calls ----

X = jnp.zeros((3, 8))
ROUTING = Routing(jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 2)))
WEIGHT = Linear(jnp.zeros((LAYERS, 4, 2, 8, 32)), None, 40)
DOWN = Linear(jnp.zeros((LAYERS, 4, 1, 40, 32)), None, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((3, 7))}, "gate is not packed for x and y: .layers, experts, panels"),
        ({"x": jnp.zeros((2, 8))}, "live is out of range"),
        ({"x": jnp.zeros((4, 8))}, "must be of the same tokens"),
        ({"gate": Linear(WEIGHT.matrix[0], None, 40)}, "gate is not packed"),
        ({"gate": Linear(WEIGHT.matrix, jnp.zeros((LAYERS, 40)), 40)}, "the bias of gate must be"),
        ({"up": Linear(WEIGHT.matrix[:, :1], None, 40), "routing": Routing(
            jnp.ones((3, 2), jnp.int32), ROUTING.weights)}, "the routing leads out of the experts"),
        ({"down": Linear(DOWN.matrix[:1], None, 8)}, "layer is out of range of down"),
        ({"down": Linear(DOWN.matrix, None, 40)}, "down is not packed"),
        ({"layer": LAYERS}, "layer is out of range of gate"),
        ({"live": -1}, "live is out of range"),
        ({"live": 4}, "live is out of range"),
        ({"routing": Routing(ROUTING.experts - 1, ROUTING.weights)}, "the routing leads out"),
        ({"routing": Routing(ROUTING.experts + 4, ROUTING.weights)}, "the routing leads out"),
        ({"routing": Routing(ROUTING.weights, ROUTING.weights)}, "the routing must be int32"),
        ({"routing": Routing(ROUTING.experts, X)}, "the weights of the routing must be float32"),
        ({"activation": "relu"}, "there is no activation relu"),
    ],
)  # fmt: skip
def test_wrong_operands_are_refused(cpu: Kernels, change: dict[str, Any], message: str) -> None:
    call = {
        "x": X, "routing": ROUTING, "gate": WEIGHT, "up": WEIGHT, "down": DOWN, "layer": 1,
        "live": 3,
    } | change  # fmt: skip
    with pytest.raises(REFUSED, match=f"INVALID_ARGUMENT.*{message}"):
        jax.block_until_ready(cpu.experts(**call))


@pytest.mark.parametrize(
    ("top_k", "live", "message"),
    [(41, 3, "top_k must be from 1"), (2, 4, "live is out of")],
)
def test_wrong_routes_are_refused(cpu: Kernels, top_k: int, live: int, message: str) -> None:
    router = Linear(WEIGHT.matrix[0], None, 40)
    with pytest.raises(REFUSED, match=f"INVALID_ARGUMENT.*{message}"):
        jax.block_until_ready(cpu.route(X, router, 0, live, RoutingSpec(top_k)))
