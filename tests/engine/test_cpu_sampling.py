"""The CPU kernels' sampler against the reference, which rounds in another way.

Where the two draw different tokens, a float64 computation must show that rounding decided.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine import sampling
from engine.kernels.cpu.sampling import sample
from engine.sampling import COUNT_STEP, RowParams, Sampled, SlotBiases
from tests.engine.test_sampling import SAMPLERS, row_params

pytestmark = pytest.mark.usefixtures("native")

ROWS, SLOTS = 32, 40
ENTRIES = 5
# The one where a program runs at once, the other where it runs behind.
REFUSED = (ValueError, jax.errors.JaxRuntimeError)
_noise = jax.jit(jax.vmap(sampling._gumbel, in_axes=(0, None)), static_argnums=1)


def sampled_by(
    name: str, logits: np.ndarray, params: RowParams, counts: np.ndarray, live: int = ROWS
) -> tuple[Sampled, np.ndarray]:
    biases = random_biases(logits.shape[1])
    sampled, after = SAMPLERS[name](logits, params, counts, biases, np.int32(live))
    return Sampled(*map(np.asarray, sampled)), np.asarray(after)


def random_logits(rng: np.random.Generator, vocab: int, kind: str) -> np.ndarray:
    spread = rng.choice([0.01, 1, 4, 12], (ROWS, 1))
    logits = (rng.standard_normal((ROWS, vocab)) * spread).astype(np.float32)
    if kind == "ties":
        return np.round(logits) + 0  # no -0: the reference has it below 0 in the best
    if kind == "impossible":
        logits[rng.random(logits.shape) < 0.9] = -np.inf
        logits[:, 0] = 0
    return logits


def random_biases(vocab: int) -> SlotBiases:
    rng = np.random.default_rng(2)
    ids = rng.integers(0, vocab, (SLOTS, ENTRIES)).astype(np.int32)
    kinds = [-np.inf, -100, -1, 0.5, 3, 100]
    return SlotBiases(ids, rng.choice(kinds, (SLOTS, ENTRIES)).astype(np.float32))


def random_params(rng: np.random.Generator, vocab: int) -> RowParams:
    wanted_k = [0, 1, 5, 50, vocab // 2, vocab - 1, vocab + 3]
    return row_params(
        ROWS,
        temperature=rng.choice([0, 1e-30, 0.3, 1, 1, 2, 50], ROWS),
        top_k=rng.choice(wanted_k, ROWS) * rng.integers(0, 2, ROWS),
        top_p=rng.choice([0, 1e-9, 0.3, 0.95, 0.999, 1, 1], ROWS),
        min_p=rng.choice([0, 0, 1e-6, 0.05, 1], ROWS),
        presence=rng.choice([0, -0.5, 0.7], ROWS),
        frequency=rng.choice([0, -0.2, 0.3], ROWS),
        repetition=rng.choice([1, 0.8, 1.3], ROWS),
        seed=rng.integers(0, 2**64, ROWS, np.uint64),
        choice=rng.integers(0, 4, ROWS),
        position=rng.integers(0, 2**31, ROWS),
        slot=np.where(rng.random(ROWS) < 0.4, rng.permutation(SLOTS)[:ROWS], -1),
        biases=rng.integers(0, ENTRIES + 1, ROWS) * rng.integers(0, 2, ROWS),
        bias_slot=rng.integers(0, SLOTS, ROWS),
        scored=rng.random(ROWS) < 0.5,
    )


def random_call(
    seed: int, vocab: int, kind: str = "spread"
) -> tuple[np.ndarray, RowParams, np.ndarray]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, (SLOTS, vocab)).astype(np.int32) * rng.integers(0, 2, (SLOTS, 1))
    return (
        random_logits(rng, vocab, kind),
        random_params(rng, vocab),
        counts.astype(np.int32),
    )


def could_be_drawn(logits: np.ndarray, counts: np.ndarray, own: RowParams, token: int) -> bool:
    """Whether `token` wins in float64, give or take what float32 rounds off."""
    values = logits.astype(np.float64)
    biases = random_biases(len(values))
    for entry in range(own.biases):
        values[biases.ids[own.bias_slot, entry]] += biases.values[own.bias_slot, entry]
    if own.slot >= 0:
        seen, times = counts[own.slot] > 0, counts[own.slot] // COUNT_STEP
        repetition = float(own.repetition)
        divided = np.where(values > 0, values / repetition, values * repetition)
        values = np.where(seen, divided, values)
        values = values - float(own.frequency) * times - float(own.presence) * (times > 0)
    if not np.isfinite(values.max()):
        return token == 0  # no distribution
    rounding = 1e-6 * (1 + np.abs(values[np.isfinite(values)]).max())
    if own.temperature == 0:
        return bool(values[token] >= values.max() - rounding)
    temperature = float(own.temperature)
    scaled = (values - values.max()) / temperature
    slack = rounding / temperature + 1e-5

    def kept(by: float) -> np.ndarray:
        """The tokens that are left by filters that are wider by so much; narrower if below 0."""
        with np.errstate(divide="ignore"):
            left = scaled >= np.log(float(own.min_p)) - by
        if 0 < own.top_k < len(scaled):
            left &= scaled >= np.sort(scaled)[-own.top_k] - by
        left |= scaled == 0
        if own.top_p < 1:
            masses = np.where(left, np.exp(scaled), 0)
            order = np.argsort(-scaled, kind="stable")
            before = np.cumsum(masses[order]) / masses.sum()
            goal = min(max(float(own.top_p) + by, 1e-30), 1)
            last = order[min(int(np.searchsorted(before, goal)), len(order) - 1)]
            left &= scaled >= scaled[last] - by
        return left | (scaled == 0)

    row = RowParams(*(np.asarray(value)[None] for value in own))
    scores = scaled + np.asarray(_noise(row, len(scaled)))[0].astype(np.float64)
    best = scores[kept(-slack)].max()
    return bool(kept(slack)[token] and scores[token] >= best - 2 * slack)


def differing(
    logits: np.ndarray, params: RowParams, counts: np.ndarray, one: Sampled, other: Sampled
) -> int:
    """How many rows' tokens differ; all of them must be such that rounding could decide."""
    rows = np.flatnonzero(one.tokens != other.tokens)
    for row in rows:
        own = RowParams(*(value[row] for value in params))
        for sampled in (one, other):
            assert could_be_drawn(logits[row], counts, own, int(sampled.tokens[row]))
    return len(rows)


@settings(max_examples=40, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 15, 16, 17, 97, 1500, 4099]),
    kind=st.sampled_from(["spread", "ties", "impossible"]),
    seed=st.integers(0, 2**32 - 1), live=st.integers(0, ROWS),
)  # fmt: skip
def test_rows_are_those_of_the_reference(vocab: int, kind: str, seed: int, live: int) -> None:
    logits, params, counts = random_call(seed, vocab, kind)
    wanted, counts_wanted = sampled_by("reference", logits, params, counts, live)
    found, after = sampled_by("cpu", logits, params, counts, live)
    differing(logits, params, counts, wanted, found)
    same = wanted.tokens == found.tokens
    np.testing.assert_allclose(found.logprobs[same], wanted.logprobs[same], atol=1e-5)
    assert np.array_equal(found.top_ids, wanted.top_ids)
    np.testing.assert_allclose(found.top_logprobs, wanted.top_logprobs, atol=1e-5)
    assert not any(array[live:].any() for array in found)
    added = after - counts
    for row in np.flatnonzero(params.slot[:live] >= 0):
        added[params.slot[row], found.tokens[row]] -= COUNT_STEP
    assert not added.any()
    if same.all():
        assert np.array_equal(after, counts_wanted)


def test_few_draws_differ_from_the_reference() -> None:
    """And there, rounding decides."""
    vocab, calls = 1500, 100
    different = 0
    for seed in range(calls):
        logits, params, counts = random_call(seed, vocab)
        wanted = sampled_by("reference", logits, params, counts)[0]
        found = sampled_by("cpu", logits, params, counts)[0]
        different += differing(logits, params, counts, wanted, found)
    assert different <= calls * ROWS / 1000


def test_what_could_be_drawn_is_narrow() -> None:
    """The check of the tests above takes a row's own token, and hardly another row's."""
    logits, params, counts = random_call(3, 1500)
    tokens = sampled_by("cpu", logits, params, counts)[0].tokens

    def accepted(tokens: np.ndarray) -> int:
        rows = (RowParams(*own) for own in zip(*params, strict=True))
        triples = zip(logits, rows, tokens, strict=True)
        return sum(could_be_drawn(row, counts, own, int(token)) for row, own, token in triples)

    assert accepted(tokens) == ROWS
    assert accepted(np.roll(tokens, 1)) <= 2


special = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38])
values = st.one_of(
    special, st.floats(-4, 4, width=32, allow_subnormal=False), st.integers(-2, 2).map(float)
)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.sampled_from([1, 5, 16, 40]).flatmap(
        lambda vocab: arrays(np.float32, (4, vocab), elements=values)
    ),
    temperature=st.sampled_from([0.0, 1.0]), top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([0.5, 1.0]), min_p=st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_any_logits_give_the_token_of_the_reference(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Not a number, infinite, equal: greedy is the first largest; where there is no
    distribution to draw from, 0."""
    params = row_params(
        4, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, scored=True
    )
    counts = np.zeros((1, logits.shape[1]), np.int32)
    wanted, found = (sampled_by(name, logits, params, counts, 4)[0] for name in SAMPLERS)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert np.array_equal(np.isfinite(found.logprobs), np.isfinite(wanted.logprobs))
    assert ((found.top_ids >= 0) & (found.top_ids < logits.shape[1])).all()


@pytest.mark.parametrize("vocab", [1, 13, 97, 4099])
def test_bits_are_the_same_on_every_instruction_set_in_any_company(
    native: ModuleType, vocab: int
) -> None:
    """On one thread and on two, alone and among others, from every place of a batch."""
    logits, params, counts = random_call(7, vocab)
    wanted: tuple[bytes, ...] | None = None
    for name in native.instruction_sets():
        native.use_instruction_set(name)
        for threads in (1, 2):
            native.limit_threads(threads)
            sampled, after = sampled_by("cpu", logits, params, counts)
            found = tuple(array.tobytes() for array in (*sampled, after))
            assert wanted is None or found == wanted, name
            wanted = found
        together, _ = sampled_by("cpu", logits, params, counts)
        order = np.random.default_rng(1).permutation(ROWS)
        mixed, _ = sampled_by("cpu", logits[order], RowParams(*(v[order] for v in params)), counts)
        for one, other in zip(together, mixed, strict=True):
            assert one[order].tobytes() == other.tobytes()
        for row in range(4):
            own = RowParams(*(value[row : row + 1] for value in params))
            alone, _ = sampled_by("cpu", logits[row : row + 1], own, counts, 1)
            for one, other in zip(together, alone, strict=True):
                assert one[row : row + 1].tobytes() == other.tobytes()


def test_counts_stay_where_they_are() -> None:
    logits, params, counts = random_call(1, 97)
    on_device = jnp.asarray(counts)
    jitted = jax.jit(sample, donate_argnums=2)
    biases = random_biases(97)
    program = jitted.lower(logits, params, on_device, biases, np.int32(ROWS)).compile()
    shape = rf"\[{SLOTS},97\]"
    assert re.search(shape, program.as_text()), "the pattern finds the counts"
    assert not re.findall(rf"= \w+{shape}\S* copy\(", program.as_text())
    before = on_device.unsafe_buffer_pointer()
    after = program(logits, params, on_device, biases, np.int32(ROWS))[1]
    assert after.unsafe_buffer_pointer() == before


LOGITS, PARAMS, COUNTS = np.zeros((3, 8), np.float32), row_params(3), np.zeros((2, 8), np.int32)
BIASES = SlotBiases(np.zeros((2, 4), np.int32), np.zeros((2, 4), np.float32))


def with_changed(**changes: Any) -> tuple[Any, ...]:
    return LOGITS, PARAMS._replace(**changes), COUNTS, BIASES, 3


@pytest.mark.parametrize(
    ("operands", "complaint"),
    [
        ((LOGITS.astype(np.float16), PARAMS, COUNTS, BIASES, 3), "logits"),
        ((LOGITS, PARAMS, COUNTS.astype(np.float32), BIASES, 3), "counts"),
        ((LOGITS, PARAMS, COUNTS[:, :7], BIASES, 3), "counts"),
        ((LOGITS, PARAMS, COUNTS, BIASES, 4), "num_rows"),
        ((LOGITS, PARAMS, COUNTS, BIASES, -1), "num_rows"),
        ((LOGITS, PARAMS, COUNTS, BIASES._replace(ids=BIASES.values), 3), "bias_ids must be"),
        ((LOGITS, PARAMS, COUNTS, BIASES._replace(values=BIASES.ids), 3), "bias_values must be"),
        (with_changed(biases=np.array([0, 5, 0], np.int32)), "biases are out of range"),
        (with_changed(biases=np.array([0, -1, 0], np.int32)), "biases are out of range"),
        (
            with_changed(
                biases=np.array([0, 1, 0], np.int32), bias_slot=np.array([2, 2, 2], np.int32)
            ),
            "bias_slot is out of range",
        ),
        (with_changed(slot=np.array([0, -1, 2], np.int32)), "slot is out of range"),
        (with_changed(slot=np.array([1, -1, 1], np.int32)), "slot is that of two rows"),
        (with_changed(seed=np.zeros((3, 3), np.uint32)), "seed"),
        (with_changed(seed=np.zeros((3, 2), np.int32)), "seed"),
        *(
            (with_changed(**{name: wrong}), f"{name} must be")
            for name in RowParams._fields
            if name != "seed"
            for value in (getattr(PARAMS, name),)
            for wrong in (value[:2], value.astype(np.float16))
        ),
    ],
)  # fmt: skip
def test_wrong_operands_are_errors(operands: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(REFUSED, match=f"INVALID_ARGUMENT.*{complaint}"):
        jax.block_until_ready(sample(*operands))
