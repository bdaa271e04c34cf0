"""The fields that completions and chat share: how to choose tokens, when to stop, how to answer."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass

from engine.types import MAX_HELD_STOPS, ModelLimits, SamplingParams
from protos.codec import MAX_CHOICES
from router.errors import BadRequest, ContextLengthExceeded
from router.fields import Fields, check_text, is_integer, show
from router.logit_bias import read_logit_bias
from router.urgency import AskedUrgency

log = logging.getLogger("hexserve.router")

MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
"""Each is sent with every choice, and a request of under 1 MB can name a vocabulary."""
DEFAULT_COMPLETION_TOKENS = 16

NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
"""The least and the largest value of each."""

_SEED_MASK = 2**64 - 1
# Dividing logits by less than this overflows; the choice is the greedy one long before.
_GREEDY_BELOW = 1e-5

WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """All of a request but its prompt.

    Attributes:
        sampling: complete but for what `fit` adds: `seed`, and `max_tokens`, which depends on
            the prompt.
        seed: as asked for, None when absent.
        n: choices for each prompt.
        max_tokens: as asked for, None when absent; 0 wants the prompt alone, for which the
            workers are asked for one token all the same.
        max_tokens_param, min_tokens_param: the fields' names for errors.
        default_max_tokens: used when absent; None is the rest of the context.
        include_usage: streamed: one more chunk at the end tells the usage.
        continuous_usage: streamed: every chunk tells the usage so far.
    """

    model: str
    sampling: SamplingParams
    seed: int | None
    n: int
    max_tokens: int | None
    max_tokens_param: str
    min_tokens_param: str
    default_max_tokens: int | None
    stops: tuple[str, ...]
    skip_special_tokens: bool
    return_token_ids: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    urgency: AskedUrgency

    @property
    def tells_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self.sampling.top_logprobs is not None

    def fit(
        self, prompt_tokens: int, max_model_len: int, seeds: random.Random, *, prompt_param: str
    ) -> SamplingParams:
        """The complete sampling parameters for a prompt of this length.

        Args:
            seeds: draws a seed where the request has none, one for each prompt: equal prompts
                of one request would have equal answers otherwise.
            prompt_param: the field that an error about the prompt's length names.

        Raises:
            ContextLengthExceeded: prompt and output do not fit the model's context.
            BadRequest: less output is allowed than asked for at least.
        """
        room = max_model_len - prompt_tokens
        if room < 1:
            raise ContextLengthExceeded(
                f"{prompt_param} has {prompt_tokens} tokens; the model's context (max_model_len) "
                f"is {max_model_len} tokens, prompt and at least one output token together",
                param=prompt_param,
            )
        wanted = self.max_tokens
        if wanted is None:
            wanted = room if self.default_max_tokens is None else self.default_max_tokens
            wanted = min(wanted, room)
        if wanted > room:
            raise ContextLengthExceeded(
                f"{self.max_tokens_param}={wanted} is too large: the prompt has "
                f"{prompt_tokens} tokens and the model's context (max_model_len) is "
                f"{max_model_len} tokens, so at most {room} can be asked for",
                param=self.max_tokens_param,
            )
        if self.sampling.min_tokens > wanted:
            raise BadRequest(
                f"{self.min_tokens_param}={self.sampling.min_tokens} is more than the {wanted} "
                f"tokens of {self.max_tokens_param}",
                param=self.min_tokens_param,
            )
        seed = seeds.getrandbits(64) if self.seed is None else self.seed & _SEED_MASK
        return dataclasses.replace(self.sampling, max_tokens=max(wanted, 1), seed=seed)


def read_options(
    fields: Fields,
    *,
    model: str,
    limits: ModelLimits,
    defaults: Mapping[str, float],
    max_tokens: int | None,
    max_tokens_param: str,
    default_max_tokens: int | None,
    top_logprobs: int | None,
) -> RequestOptions:
    """Read the shared fields.

    Args:
        fields: the request's body.
        model: the served model's name for the answer.
        limits: the served model's.
        defaults: what the model's generation_config.json says, for absent fields.
        max_tokens, max_tokens_param, default_max_tokens, top_logprobs: see RequestOptions and
            SamplingParams; read by the caller, as the fields' names differ.

    Raises:
        BadRequest: a field is wrong or its feature is not there.
    """
    _refuse_missing_features(fields)
    stop_ids = _stop_token_ids(fields, limits)
    if not fields.flag("ignore_eos"):
        stop_ids |= limits.eos_token_ids
    stream = fields.flag("stream")
    include_usage, continuous_usage = _stream_options(fields, stream)
    return RequestOptions(
        model=model,
        sampling=_sampling(fields, limits, defaults, stop_ids, top_logprobs),
        seed=fields.optional_integer("seed"),
        n=fields.integer("n", 1, low=1, high=MAX_CHOICES),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        min_tokens_param=fields.param("min_tokens"),
        default_max_tokens=default_max_tokens,
        stops=_stop_strings(fields),
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        return_token_ids=fields.flag("return_token_ids"),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        urgency=AskedUrgency.read(fields),
    )


def usable_defaults(defaults: Mapping[str, float]) -> dict[str, float]:
    """`defaults` of a generation_config.json without those that no request could have either."""
    usable = {}
    for name, value in defaults.items():
        given = Fields({name: value}, prefix="generation_config.json: ", integral_floats=True)
        try:
            if name == "top_k":
                _top_k(given, {})
            else:
                _number(given, name, {}, 0.0)
        except BadRequest as error:
            log.warning("%s; it is left out", error)
        else:
            usable[name] = value
    return usable


def _top_k(fields: Fields, defaults: Mapping[str, float]) -> int:
    return fields.integer("top_k", int(defaults.get("top_k", 0)), low=-1)


def _number(fields: Fields, name: str, defaults: Mapping[str, float], neutral: float) -> float:
    low, high = NUMBERS[name]
    return fields.number(name, defaults.get(name, neutral), low=low, high=high)


def _sampling(
    fields: Fields,
    limits: ModelLimits,
    defaults: Mapping[str, float],
    stop_token_ids: frozenset[int],
    top_logprobs: int | None,
) -> SamplingParams:
    temperature = _number(fields, "temperature", defaults, 1.0)
    top_k = _top_k(fields, defaults)
    top_p = _number(fields, "top_p", defaults, 1.0)
    if top_p == 0:  # no token's probability is 0: the likeliest one alone is left
        top_k, top_p = 1, 1.0
    return SamplingParams(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=0 if top_k < 0 or top_k >= limits.vocab_size else top_k,
        top_p=top_p,
        min_p=_number(fields, "min_p", defaults, 0.0),
        presence_penalty=_number(fields, "presence_penalty", {}, 0.0),
        frequency_penalty=_number(fields, "frequency_penalty", {}, 0.0),
        repetition_penalty=_number(fields, "repetition_penalty", defaults, 1.0),
        stop_token_ids=stop_token_ids,
        min_tokens=_min_tokens(fields, stop_token_ids),
        logit_bias=read_logit_bias(fields, limits),
        top_logprobs=top_logprobs,
    )


def _min_tokens(fields: Fields, stop_token_ids: frozenset[int]) -> int:
    value, param = fields.integer("min_tokens", 0, low=0), fields.param("min_tokens")
    if value and len(stop_token_ids) > MAX_HELD_STOPS:
        raise BadRequest(
            f"{param}={value} with {len(stop_token_ids)} stop tokens, those of the model among "
            f"them: the limit is {MAX_HELD_STOPS}",
            param=param,
        )
    return value


def _stop_strings(fields: Fields) -> tuple[str, ...]:
    value, param = fields.raw("stop"), fields.param("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise BadRequest(
            f"{param} must be a string or a list of strings, got {show(value)}", param=param
        )
    if len(stops) > MAX_STOP_STRINGS:
        raise BadRequest(
            f"{param} has {len(stops)} strings, the limit is {MAX_STOP_STRINGS}", param=param
        )
    for stop in stops:
        length = len(check_text(stop, param))
        if not 1 <= length <= MAX_STOP_LENGTH:
            raise BadRequest(
                f"{param} strings must have 1 to {MAX_STOP_LENGTH} characters, "
                f"got {length}: {show(stop)}",
                param=param,
            )
    return tuple(stops)


def _stop_token_ids(fields: Fields, limits: ModelLimits) -> frozenset[int]:
    value, param = fields.raw("stop_token_ids"), fields.param("stop_token_ids")
    if value is None:
        return frozenset()
    if isinstance(value, list) and len(value) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(
            f"{param} has {len(value)} ids, the limit is {MAX_STOP_TOKEN_IDS}", param=param
        )
    return frozenset(check_token_ids(value, param, limits.vocab_size))


def check_token_ids(value: object, param: str, vocab_size: int) -> list[int]:
    """A list of token ids of the vocabulary.

    Raises:
        BadRequest: it is no list, or an item is no token id.
    """
    if not isinstance(value, list):
        raise BadRequest(f"{param} must be a list of token ids, got {show(value)}", param=param)
    # Millions of ids are checked in C; only where one is wrong is it looked for.
    if not value:
        return value
    if set(map(type, value)) == {int}:
        ids = set(value)
        if min(ids) >= 0 and max(ids) < vocab_size:
            return value
    for position, token in enumerate(value):
        if not is_integer(token) or not 0 <= token < vocab_size:
            raise BadRequest(
                f"{param}[{position}] must be a token id from 0 to {vocab_size - 1}, "
                f"got {show(token)}",
                param=param,
            )
    return value


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    value, param = fields.raw("stream_options"), fields.param("stream_options")
    if value is None:
        return False, False
    if not isinstance(value, dict):
        raise BadRequest(f"{param} must be an object, got {show(value)}", param=param)
    if not stream:
        raise BadRequest(f"{param} is only allowed with stream=true", param=param)
    options = Fields(value, prefix=f"{param}.")
    include_usage = options.flag("include_usage")
    continuous = options.flag("continuous_usage_stats")
    options.flag("include_obfuscation")  # pads chunks against traffic analysis; a mere hint
    options.finish()
    return include_usage, include_usage and continuous


def _refuse_missing_features(fields: Fields) -> None:
    fields.ignore(WITHOUT_EFFECT)
    fields.only("moderation", [], "nothing is moderated")
    fields.only("response_format", [{"type": "text"}], "only text can be generated")
