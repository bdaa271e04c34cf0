"""Sampling on the device, row by row: a row's token depends on nothing but the row.

Noise is threefry keyed by fold_in(fold_in(key(seed), choice), position) and indexed by token
id, so the same request and seed give the same tokens in every batch, on every placement and
after every restart. Nothing here sorts the vocabulary: top-k and top-p find their threshold
by bisection over the bits of the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import threefry_2x32

from engine.types import MAX_HELD_STOPS, MAX_LOGIT_BIASES, MAX_TOP_LOGPROBS

_EXCLUDED = -jnp.inf
COUNT_STEP = 2
"""Penalty counts hold COUNT_STEP * (times in the output) + (1 if in the prompt)."""
BIASES = MAX_LOGIT_BIASES + MAX_HELD_STOPS
"""Tokens that one slot can bias."""


class SlotBiases(NamedTuple):
    """What each slot adds to logits: token ids and values, [slots, BIASES] each."""

    ids: Any  # int32
    values: Any  # float32


class RowParams(NamedTuple):
    """How each row samples; [S] each. See engine.plan.RowSampling.

    `seed` is uint32 [S, 2] (high word, low word). `slot` is -1 for rows without penalties;
    `scored` tells which rows want log-probabilities. The first `biases` entries of slot
    `bias_slot` apply.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    presence: Any
    frequency: Any
    repetition: Any
    seed: Any
    choice: Any
    position: Any
    slot: Any
    biases: Any
    bias_slot: Any
    scored: Any


class Scores(NamedTuple):
    """float32 [S] log-probabilities of given tokens, and those of the likeliest K."""

    logprobs: Any
    top_ids: Any  # int32 [S, K]
    top_logprobs: Any  # float32 [S, K]


class Sampled(NamedTuple):
    """[S] token ids; log-probabilities of them and of the likeliest K, zeros if not asked."""

    tokens: Array
    logprobs: Array
    top_ids: Array  # [S, K]
    top_logprobs: Array  # [S, K]


def sample(
    logits: Array, params: RowParams, counts: Array, biases: SlotBiases, num_rows: Array
) -> tuple[Sampled, Array]:
    """Choose the next token of each of the first `num_rows` rows.

    Args:
        logits: float32 [S, V].
        counts: int32 [slots, V] penalty counts; updated in place for penalized rows.
        biases: added first, then come penalties, temperature and filters: vLLM's order.

    Returns:
        the sampled tokens, and the counts. Log-probabilities are those of the logits as the
        model gave them, before biases, penalties and temperature.
    """
    rows, vocab = logits.shape
    best = min(MAX_TOP_LOGPROBS, vocab)
    empty = Sampled(
        jnp.zeros((rows,), jnp.int32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, best), jnp.int32),
        jnp.zeros((rows, best), jnp.float32),
    )

    def one_row(row: Array, carry: tuple[Sampled, Array]) -> tuple[Sampled, Array]:
        out, counts = carry
        own = RowParams(*(p[row] for p in params))
        raw = logits[row]
        penalized = own.slot >= 0
        slot = jnp.maximum(own.slot, 0)
        biased = lax.cond(own.biases > 0, lambda: _bias(raw, biases, own), lambda: raw)
        row_logits = lax.cond(
            penalized, lambda: _penalize(biased, counts[slot], own), lambda: biased
        )
        token = lax.cond(
            own.temperature > 0.0,
            lambda: _draw(row_logits, own),
            lambda: jnp.argmax(row_logits).astype(jnp.int32),
        )
        added = jnp.where(penalized, COUNT_STEP, 0)
        counts = counts.at[slot, token].add(added)
        scores = lax.cond(
            own.scored,
            lambda: _score(raw, token, best),
            lambda: (jnp.float32(0), out.top_ids[row], out.top_logprobs[row]),
        )
        values = Sampled(token, *scores)
        return Sampled(*(o.at[row].set(v) for o, v in zip(out, values, strict=True))), counts

    return lax.fori_loop(0, num_rows, one_row, (empty, counts))


def score(logits: Array, tokens: Array, num_rows: Array) -> Scores:
    """Log-probabilities of `tokens` [S] by float32 logits [S, V]; `num_rows` are wanted."""
    best = min(MAX_TOP_LOGPROBS, logits.shape[1])
    return Scores(*jax.vmap(lambda row, token: _score(row, token, best))(logits, tokens))


def load_counts(counts: Array, slot: Array, tokens: Array, added: Array) -> Array:
    """Rebuild one slot: `tokens` [n] are ids, `added` [n] what each adds (0 for padding).

    A prompt token adds 1 the first time it occurs, an output token COUNT_STEP every time.
    """
    row = jnp.zeros((counts.shape[1],), counts.dtype).at[tokens].add(added)
    return counts.at[slot].set(row)


def load_biases(biases: SlotBiases, slot: Array, ids: Array, values: Array) -> SlotBiases:
    """Replace the entries of one slot by `ids` and `values` [BIASES]."""
    return SlotBiases(biases.ids.at[slot].set(ids), biases.values.at[slot].set(values))


def _bias(logits: Array, biases: SlotBiases, own: RowParams) -> Array:
    ids, values = biases.ids[own.bias_slot], biases.values[own.bias_slot]
    used = jnp.arange(ids.shape[0]) < own.biases
    return logits.at[jnp.where(used, ids, logits.shape[0])].add(values, mode="drop")


def _penalize(logits: Array, counts: Array, own: RowParams) -> Array:
    """OpenAI's presence and frequency penalties; Hugging Face's repetition penalty."""
    times = counts // COUNT_STEP
    seen = counts > 0
    divided = jnp.where(logits > 0, logits / own.repetition, logits * own.repetition)
    logits = jnp.where(seen, divided, logits)
    return logits - own.frequency * times - own.presence * (times > 0)


def _draw(logits: Array, own: RowParams) -> Array:
    """A token drawn by the Gumbel trick from the distribution that the row's filters leave."""
    # The likeliest token is at 0: a temperature near 0 overflows to -inf for others alone.
    scaled = (logits - logits.max()) / own.temperature
    scaled = jnp.where(scaled >= jnp.log(own.min_p), scaled, _EXCLUDED)
    vocab = logits.shape[0]
    limited = (own.top_k > 0) & (own.top_k < vocab)
    scaled = lax.cond(limited, lambda: _keep_top_k(scaled, own.top_k), lambda: scaled)
    scaled = lax.cond(own.top_p < 1.0, lambda: _keep_top_p(scaled, own.top_p), lambda: scaled)
    return jnp.argmax(scaled + _gumbel(own, vocab)).astype(jnp.int32)


def _gumbel(own: RowParams, vocab: int) -> Array:
    """float32 [vocab] standard Gumbel noise; entry i depends on the row's key and on i alone."""
    key = jax.random.wrap_key_data(own.seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, own.choice), own.position)
    ids = jnp.arange(vocab, dtype=jnp.uint32)
    # threefry_2x32 pairs the halves of its counts: pair id i with 0.
    pairs = jnp.concatenate([ids, jnp.zeros_like(ids)])
    bits = threefry_2x32(jax.random.key_data(key), pairs)[:vocab]
    # 23 bits, centred in their step: never 0 and never 1.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * (2.0**-23)
    return -jnp.log(-jnp.log(uniform))


def _ordered_bits(values: Array) -> Array:
    """uint32 that sort as the float32 `values` do; both zeros are equal."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(bits: Array, enough: Any) -> Array:
    """The largest uint32 t for which `enough(bits >= t)` holds; it must hold for t = 0."""

    def halve(index: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(enough(bits >= candidate), candidate, threshold)

    return lax.fori_loop(0, 32, halve, jnp.uint32(0))


def _keep_top_k(logits: Array, k: Array) -> Array:
    """The k likeliest, and whatever ties with the last of them."""
    bits = _ordered_bits(logits)
    threshold = _largest_threshold(bits, lambda kept: kept.sum(dtype=jnp.int32) >= k)
    return jnp.where(bits >= threshold, logits, _EXCLUDED)


def _keep_top_p(logits: Array, p: Array) -> Array:
    """The smallest set of likeliest tokens whose probabilities sum to at least p."""
    weights = jnp.exp(logits - logits.max())
    goal = jnp.maximum(p * weights.sum(), 1e-30)  # above 0: the likeliest always stays
    bits = _ordered_bits(logits)

    def enough(kept: Array) -> Array:
        return jnp.where(kept, weights, 0.0).sum() >= goal

    return jnp.where(bits >= _largest_threshold(bits, enough), logits, _EXCLUDED)


def _score(logits: Array, token: Array, best: int) -> tuple[Array, Array, Array]:
    """Log-probability of `token`, and ids and log-probabilities of the likeliest `best`."""
    total = jax.nn.logsumexp(logits)
    top, ids = lax.top_k(logits, best)
    return logits[token] - total, ids.astype(jnp.int32), top - total
