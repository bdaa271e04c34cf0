"""Plain values that cross the engine's border: requests in, tokens out.

No jax here: the router and the wire format import this module.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

MAX_TOP_LOGPROBS = 20
"""Most alternatives reported per token (OpenAI's limit for chat)."""

MAX_LOGIT_BIASES = 300
"""Most tokens that one request may bias (OpenAI's limit)."""
MAX_TOKEN_ID = 2**31 - 1
"""Token ids are int32 on the devices."""
MAX_HELD_STOPS = 212
"""Most stop tokens of a request with min_tokens, which the devices hold back one by one."""

KVArrays = tuple[Any, ...]
"""KV of n tokens outside of a pool, in the payload's order (K, V) and the model's own heads:
numpy arrays [layers, n, heads, width], or arrays that stay on the devices of the engine that
made them, [layers, N, heads, width] of which the first n tokens count (N is the engine's
chunk size)."""


class Role(enum.Flag):
    """What a worker does for a request; a colocated worker does both."""

    PREFILL = enum.auto()
    DECODE = enum.auto()

    def __str__(self) -> str:
        """As a person reads it: prefill, decode or colocated."""
        names = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
        return names.get(self, "colocated")


COLOCATED = Role.PREFILL | Role.DECODE


class FinishReason(enum.Enum):
    """Why a sequence produced its last token."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens, or the model's context is full


class AttemptId(NamedTuple):
    """One try at serving one request. A retry has the next attempt number."""

    request_id: str
    attempt: int


class SequenceId(NamedTuple):
    """One output of one attempt; `choice` counts from 0 to n - 1."""

    attempt: AttemptId
    choice: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, fully resolved: no field depends on anything else.

    Attributes:
        temperature: 0 is greedy. Above 0, logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities sum to at least top_p.
        min_p: keep tokens at least min_p times as likely as the likeliest.
        presence_penalty, frequency_penalty: OpenAI's, over output tokens.
        repetition_penalty: Hugging Face's, over prompt and output tokens; 1 is none.
        seed: unsigned 64 bits. Noise depends on (seed, choice, position, token id) alone.
        max_tokens: most output tokens, at least 1.
        stop_token_ids: end the sequence with any of these (end-of-sequence ids included).
        min_tokens: no stop token is sampled before so many others; at most max_tokens.
        logit_bias: pairs of a token id and what is added to its logit, before penalties and
            temperature; ids differ, at most MAX_LOGIT_BIASES.
        top_logprobs: None for no log-probabilities; else the number of alternatives
            (0..MAX_TOP_LOGPROBS) reported beside the chosen token's.
        prompt_logprobs: the same of each prompt token but the first.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def needs_all_logits(self) -> bool:
        """True when every prompt token must be computed, whether or not its KV is there."""
        return self.prompt_logprobs is not None

    @property
    def needs_token_counts(self) -> bool:
        """True when a penalty makes the choice depend on earlier tokens."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position, from the unscaled logits.

    `top_ids` and `top_logprobs` run from the likeliest down and have equal lengths.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Natural-log probabilities of prompt tokens [start, start + n), each after those before it.

    Attributes:
        start: at least 1, as nothing comes before token 0.
        logprobs: float32 [n].
        top_ids, top_logprobs: int32 and float32 [n, k], from the likeliest down.
    """

    id: SequenceId
    start: int
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @property
    def stop(self) -> int:
        return self.start + len(self.logprobs)

    def pieces(self, most: int) -> Iterable[PromptLogprobs]:
        """The same in parts of at most `most` tokens."""
        for begin in range(0, len(self.logprobs), most):
            part = slice(begin, begin + most)
            yield PromptLogprobs(
                self.id,
                self.start + begin,
                self.logprobs[part],
                self.top_ids[part],
                self.top_logprobs[part],
            )


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """A sequence to compute.

    Attributes:
        id: who it is.
        roles: what this worker does for it. PREFILL alone ends with the first new token
            and keeps the KV for export; DECODE alone imports KV and goes on from there.
        prompt: prompt token ids, at least one.
        output: tokens an earlier attempt has already produced; they are computed like
            prompt tokens, and positions and penalties go on after them.
        sampling: how to choose tokens; `max_tokens` counts `output` too.
        transfer_id: names the KV handoff, random per attempt; b"" when colocated.
        priority: a lower one is served first.
        group: shared by the choices of one prompt, which compute it once; b"" for one alone.
    """

    id: SequenceId
    roles: Role
    prompt: tuple[int, ...]
    sampling: SamplingParams
    output: tuple[int, ...] = ()
    transfer_id: bytes = b""
    priority: int = 0
    group: bytes = b""

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """All tokens whose KV is needed before the next one can be sampled."""
        return self.prompt + self.output


class TokenDelta(NamedTuple):
    """New tokens of one sequence from one engine step. A plain tuple: every token makes some.

    `index` is the output position of `tokens[0]`. `logprobs`, when asked for, has one
    entry per token. `finish` is set on the last delta of a sequence. `cached_tokens` is set on
    the first one, by whoever computed the prompt: how many of its tokens it had not to compute.
    `prefill_s` comes with it: seconds from the prompt's admission to that token.
    `prompt_logprobs`, all of them, come with the first delta that a client's request gets, if it
    asked for them.
    """

    id: SequenceId
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    prefill_s: float = 0.0


class FailureCode(enum.Enum):
    """Why an attempt ended without its tokens."""

    INVALID = "invalid"  # the request can never be served here
    TRANSFER = "transfer"  # the KV handoff broke
    INTERNAL = "internal"  # a fault of the worker
    PREEMPTED = "preempted"  # older sequences needed its KV blocks


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that ends here without finishing; another attempt may succeed."""

    attempt: AttemptId
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class Load:
    """How busy an engine is, as the router weighs it.

    Blocks are counted by owner: free + cached + running + exported = total.
    `step_age_s` is how long the step now running has been running, 0 when idle; `compiles`
    how many programs were compiled after the warm-up, 0 in a sound engine. `export_limited`:
    no prefill begins before readers have fetched what is exported. Of `prefix_queries` tokens of
    prompts begun here since the engine's start, `prefix_hits` were found in the prefix cache.
    """

    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    running_blocks: int = 0
    exported_blocks: int = 0
    step_age_s: float = 0.0
    compiles: int = 0
    export_limited: bool = False
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the router must know of a worker's model to check and route requests."""

    fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_seqs: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
