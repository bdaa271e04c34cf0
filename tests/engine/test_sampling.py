"""Both samplers against NumPy oracles, and their independence of everything but the row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from engine import sampling
from engine.kernels.cpu import sampling as cpu_sampling
from engine.sampling import COUNT_STEP, RowParams, Sampled, SlotBiases
from engine.types import MAX_TOP_LOGPROBS

Draw = Callable[..., tuple[Sampled, np.ndarray]]
SAMPLERS = {"reference": jax.jit(sampling.sample), "cpu": jax.jit(cpu_sampling.sample)}
_load_counts = jax.jit(sampling.load_counts)

PINNED = [667, 29, 634, 245, 269, 392, 116, 98]


def row_params(rows: int, **changes: object) -> RowParams:
    """Greedy rows without penalties, with `changes` (scalars or [rows])."""
    defaults: dict[str, tuple[object, type]] = {
        "temperature": (0.0, np.float32), "top_k": (0, np.int32), "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32), "presence": (0.0, np.float32),
        "frequency": (0.0, np.float32), "repetition": (1.0, np.float32),
        "choice": (0, np.int32), "position": (5, np.int32), "slot": (-1, np.int32),
        "biases": (0, np.int32), "bias_slot": (0, np.int32), "scored": (False, np.bool_),
    }  # fmt: skip
    seeds = np.broadcast_to(np.asarray(changes.pop("seed", 0), np.uint64), (rows,))
    words = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1)
    arrays = {
        name: np.broadcast_to(np.asarray(changes.pop(name, value), dtype), (rows,)).copy()
        for name, (value, dtype) in defaults.items()
    }
    assert not changes
    return RowParams(seed=words.astype(np.uint32), **arrays)


NO_BIASES = SlotBiases(np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32))


def draw_by(
    sample: Any,
    logits: np.ndarray,
    params: RowParams,
    counts: np.ndarray | None = None,
    biases: SlotBiases = NO_BIASES,
    live: int | None = None,
    exact: bool = False,
) -> tuple[Sampled, np.ndarray]:
    """Sample every row, or the first `live`; logits of one row serve for all.

    Rows are padded to a few sizes, so that few programs are compiled.
    """
    rows, vocab = len(params.temperature), logits.shape[-1]
    padding = 0 if exact else (128 if rows <= 128 else 4096) - rows
    logits = np.broadcast_to(logits, (rows, vocab)).astype(np.float32)
    logits, *padded = (
        np.pad(array, [(0, padding), *[(0, 0)] * (array.ndim - 1)]) for array in (logits, *params)
    )
    slots = np.zeros((128, vocab), np.int32)
    if counts is not None:
        slots[: len(counts)] = counts
    live = rows if live is None else live
    sampled, after = sample(logits, RowParams(*padded), slots, biases, np.int32(live))
    after = np.asarray(after)[: 1 if counts is None else len(counts)]
    return Sampled(*(np.asarray(array)[:rows] for array in sampled)), after


@pytest.fixture(params=SAMPLERS)
def draw(request: pytest.FixtureRequest) -> Draw:
    """See draw_by."""
    if request.param == "cpu":
        request.getfixturevalue("native")
    return partial(draw_by, SAMPLERS[request.param])


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def kept_by(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set:
    """Ids that the filters leave, by sorting; what ties with the last one kept is kept."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = softmax(scaled)
    kept = probabilities >= min_p * probabilities.max()
    if top_k:
        candidates = np.sort(scaled[kept])[::-1]
        kept &= scaled >= candidates[min(top_k, len(candidates)) - 1]
    if top_p < 1:
        masses = np.where(kept, probabilities, 0) / probabilities[kept].sum()
        order = np.sort(masses)[::-1]
        enough = int(np.searchsorted(np.cumsum(order), top_p)) + 1
        kept &= masses >= order[min(enough, len(order)) - 1]
    return set(np.flatnonzero(kept).tolist())


def test_temperature_zero_is_argmax_and_padding_rows_are_left_alone(draw: Draw) -> None:
    logits = np.random.default_rng(0).standard_normal((6, 64))
    logits[2, [7, 30]] = 9  # a tie goes to the lower id
    sampled, counts = draw(logits, row_params(6, seed=3), live=4)
    assert sampled.tokens[:4].tolist() == logits[:4].argmax(axis=1).tolist()
    assert sampled.tokens[2] == 7
    assert not any(array[4:].any() for array in sampled)
    assert not any(array.any() for array in sampled[1:])  # nobody asked for log-probabilities
    assert not counts.any()


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 16},
    {"top_k": 99},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.2},
    {"temperature": 4.0, "top_p": 0.6},
    {"temperature": 0.5, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 3, "min_p": 0.5},
]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_leave_exactly_the_right_tokens(
    draw: Draw, filters: dict[str, float], ties: bool
) -> None:
    """2,000 draws from 16 tokens, none with a probability below 1 %, find all that are left."""
    rng = np.random.default_rng(11)
    logits = rng.permutation(np.linspace(-1, 1, 16)).astype(np.float32)
    if ties:
        logits = np.round(logits * 2) / 2
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    if settings["temperature"] < 1:
        logits = logits * settings["temperature"]
    sampled, _ = draw(logits, row_params(2000, seed=np.arange(2000), **settings))
    wanted = kept_by(logits, **settings)
    assert 1 <= len(wanted) <= 16
    assert set(sampled.tokens.tolist()) == wanted


def test_the_threshold_searches_are_exact_on_wide_vocabularies() -> None:
    """Where drawing could not tell: 2,000 tokens, negative zeros, excluded ones, ties."""
    rng = np.random.default_rng(5)
    keep_k, keep_p = jax.jit(sampling._keep_top_k), jax.jit(sampling._keep_top_p)
    for round_ in range(30):
        logits = (rng.standard_normal(2000) * rng.choice([0.01, 1, 10])).astype(np.float32)
        if round_ % 3 == 0:
            logits = np.round(logits)
        if round_ % 3 == 1:
            logits[rng.permutation(2000)[:1500]] = -np.inf
        possible = logits > -np.inf
        k = int(rng.integers(1, 1000))
        kept = np.asarray(keep_k(logits, np.int32(k))) > -np.inf
        smallest = np.sort(logits)[::-1][k - 1]
        assert np.array_equal(kept, possible & (logits >= smallest))
        p = float(rng.uniform(0.05, 0.95))
        kept = np.asarray(keep_p(logits, np.float32(p))) > -np.inf
        masses = softmax(logits)
        assert masses[kept].sum() >= p - 1e-5
        # Without the least likely value kept, too little would be left.
        assert masses[kept & (logits > logits[kept].min())].sum() < p + 1e-5
        assert np.array_equal(kept, possible & (logits >= logits[kept].min()))


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_temperature_near_zero_is_greedy(draw: Draw, temperature: float, sign: int) -> None:
    logits = 100 * sign + np.random.default_rng(2).standard_normal((20, 64)) * 4
    params = row_params(20, temperature=temperature, top_p=0.9, top_k=5, seed=np.arange(20))
    assert draw(logits, params)[0].tokens.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 1e-9, 0.01])
def test_a_top_p_near_zero_leaves_the_likeliest(draw: Draw, top_p: float) -> None:
    logits = np.random.default_rng(3).standard_normal((20, 64)) * 3
    params = row_params(20, temperature=1.0, top_p=top_p, seed=np.arange(20))
    assert draw(logits, params)[0].tokens.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("key", ["seed", "position", "choice"])
def test_draws_follow_the_softmax(draw: Draw, temperature: float, key: str) -> None:
    """Chi-square of 4,000 draws at 15 degrees of freedom; 44.3 is exceeded once in 10,000."""
    logits = np.random.default_rng(12).permutation(np.linspace(-1.5, 1.5, 16))
    draws = 4000
    params = row_params(draws, temperature=temperature, **{"seed": 77} | {key: np.arange(draws)})
    counted = np.bincount(draw(logits, params)[0].tokens, minlength=16)
    wanted = softmax(logits / temperature) * draws
    assert ((counted - wanted) ** 2 / wanted).sum() < 44.3


def test_a_row_depends_on_nothing_around_it(draw: Draw) -> None:
    rng = np.random.default_rng(9)
    logits = rng.standard_normal((40, 64)) * 2
    own = {
        "temperature": rng.uniform(0.5, 1.5, 40), "top_k": rng.integers(0, 30, 40),
        "top_p": rng.uniform(0.5, 1, 40), "seed": rng.integers(0, 2**63, 40),
        "choice": rng.integers(0, 4, 40), "position": rng.integers(1, 900, 40),
    }  # fmt: skip
    alone = [
        int(
            draw(logits[i], row_params(1, **{k: v[i] for k, v in own.items()}), exact=True)[
                0
            ].tokens[0]
        )
        for i in range(40)
    ]
    assert len(set(alone)) > 10
    for size in (40, 7):
        order = rng.permutation(40)[:size]
        together = draw(
            logits[order], row_params(size, **{k: v[order] for k, v in own.items()}), exact=True
        )
        assert together[0].tokens.tolist() == [alone[i] for i in order]


def test_every_part_of_the_key_matters(draw: Draw) -> None:
    flat = np.zeros(1000)
    positions = np.arange(50)
    base = {"temperature": 1.0, "position": positions, "seed": 7, "choice": 0}
    tokens = [
        tuple(draw(flat, row_params(50, **base | change))[0].tokens.tolist())
        for change in (
            {},
            {"seed": 8},
            {"seed": 7 + (1 << 32)},
            {"seed": 7 + (1 << 63)},
            {"seed": 7 << 32},
            {"choice": 1},
            {"position": positions + 1000},
        )
    ]
    assert len(set(tokens)) == len(tokens)
    for one, other in ((0, i) for i in range(1, len(tokens))):
        agreeing = sum(a == b for a, b in zip(tokens[one], tokens[other], strict=True))
        assert agreeing <= 3


def test_seeds_give_the_tokens_that_they_have_always_given(draw: Draw) -> None:
    """A request and its seed give the same text after an upgrade."""
    params = row_params(8, temperature=1.0, seed=[*range(7), 2**64 - 1], position=12, choice=1)
    assert draw(np.zeros(1000), params)[0].tokens.tolist() == PINNED


def penalized(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
) -> np.ndarray:
    """Hugging Face's repetition penalty over all tokens, OpenAI's others over the output."""
    result = logits.astype(np.float64).copy()
    for token in {*prompt, *output}:
        result[token] = (
            result[token] / repetition if result[token] > 0 else result[token] * repetition
        )
    for token in output:
        result[token] -= frequency
    for token in set(output):
        result[token] -= presence
    return result


def counts_row(prompt: list[int], output: list[int], vocab: int) -> np.ndarray:
    row = np.zeros(vocab, np.int32)
    row[list(set(prompt))] = 1
    for token in output:
        row[token] += COUNT_STEP
    return row


@pytest.mark.parametrize(
    ("presence", "frequency", "repetition"),
    [(0.8, 0, 1), (0, 0.6, 1), (0, 0, 1.7), (0, 0, 0.6), (-0.5, 0.3, 1.3), (-1, -1, 0.8)],
)
def test_penalties_change_the_logits(
    draw: Draw, presence: float, frequency: float, repetition: float
) -> None:
    """The whole penalized distribution is right: greedy, and each row's draws."""
    rng = np.random.default_rng(4)
    rows, vocab = 100, 64
    logits = rng.standard_normal((rows, vocab)) * 0.7
    prompts = [rng.integers(0, vocab, 20).tolist() for _ in range(rows)]
    outputs = [rng.integers(0, vocab, int(rng.integers(0, 40))).tolist() for _ in range(rows)]
    slots = rng.permutation(rows)
    counts = np.zeros((rows, vocab), np.int32)
    for row, slot in enumerate(slots):
        counts[slot] = counts_row(prompts[row], outputs[row], vocab)
    wanted = np.array(
        [
            penalized(logits[i], prompts[i], outputs[i], presence, frequency, repetition)
            for i in range(rows)
        ]
    )
    own = {"presence": presence, "frequency": frequency, "repetition": repetition}
    sampled, after = draw(logits, row_params(rows, slot=slots, **own), counts)
    tokens = wanted.argmax(axis=1)
    assert sampled.tokens.tolist() == tokens.tolist()
    assert sampled.tokens.tolist() != logits.argmax(axis=1).tolist()
    counts[slots, tokens] += COUNT_STEP  # the choice counts from now on
    assert np.array_equal(after, counts)

    # The same noise on the penalized logits themselves draws the same tokens.
    noisy = {"temperature": 1.0, "seed": np.arange(rows)}
    by_engine = draw(logits, row_params(rows, slot=slots, **own, **noisy), counts)[0].tokens
    for row, slot in enumerate(slots):
        assert (
            counts[slot].tolist()
            == counts_row(prompts[row], [*outputs[row], int(tokens[row])], vocab).tolist()
        )
        wanted[row] = penalized(
            logits[row],
            prompts[row],
            [*outputs[row], int(tokens[row])],
            presence,
            frequency,
            repetition,
        )
    by_oracle = draw(wanted, row_params(rows, **noisy))[0].tokens
    assert by_engine.tolist() == by_oracle.tolist()


def test_rows_without_penalties_touch_no_counts(draw: Draw) -> None:
    counts = np.arange(128, dtype=np.int32).reshape(2, 64)
    logits = np.random.default_rng(1).standard_normal((3, 64))
    sampled, after = draw(logits, row_params(3, repetition=9.0), counts)
    assert np.array_equal(after, counts)
    assert sampled.tokens.tolist() == logits.argmax(axis=1).tolist()


def test_load_counts_rebuilds_one_slot() -> None:
    counts = np.full((3, 8), 7, np.int32)
    tokens = np.array([1, 4, 4, 4, 5, 0, 0], np.int32)
    added = np.array([1, 1, COUNT_STEP, COUNT_STEP, COUNT_STEP, 0, 0], np.int32)
    after = np.asarray(_load_counts(counts, np.int32(1), tokens, added))
    assert after[1].tolist() == [0, 1, 0, 0, 1 + 2 * COUNT_STEP, COUNT_STEP, 0, 0]
    assert (after[[0, 2]] == 7).all()


@pytest.mark.parametrize("vocab", [9, 64])
def test_logprobs_are_those_of_the_models_own_logits(draw: Draw, vocab: int) -> None:
    """Neither temperature nor penalties nor filters change what is reported."""
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((12, vocab)) * 3
    scored = np.arange(12) % 3 != 0
    params = row_params(
        12, temperature=0.8, top_k=4, seed=np.arange(12), scored=scored, slot=np.arange(12),
        repetition=2.0,
    )  # fmt: skip
    counts = np.ones((12, vocab), np.int32)
    sampled, _ = draw(logits, params, counts)
    best = min(MAX_TOP_LOGPROBS, vocab)
    assert sampled.top_ids.shape == (12, best)
    for row in range(12):
        wanted = np.log(softmax(logits[row]))
        if not scored[row]:
            assert sampled.logprobs[row] == 0
            assert not sampled.top_ids[row].any()
            continue
        np.testing.assert_allclose(sampled.logprobs[row], wanted[sampled.tokens[row]], atol=1e-5)
        order = np.argsort(-wanted)[:best]
        assert sampled.top_ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(sampled.top_logprobs[row], wanted[order], atol=1e-5)
