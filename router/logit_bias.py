"""The field `logit_bias`: an object from token ids, which are strings in JSON, to numbers."""

from __future__ import annotations

import math

from engine.types import MAX_LOGIT_BIASES, ModelLimits
from router.errors import BadRequest
from router.fields import Fields, is_integer, show

LARGEST_BIAS = 100
_MOST_DIGITS = 10  # no token id has more, and Python would refuse to read thousands


def read_logit_bias(fields: Fields, limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and what is added to its logit, by id; those that add 0 left out.

    Raises:
        BadRequest: it is no such object, has too many tokens, or one outside the vocabulary.
    """
    value, param = fields.raw("logit_bias"), fields.param("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise BadRequest(
            f"{param} must be an object of token ids and numbers, got {show(value)}", param=param
        )
    if len(value) > MAX_LOGIT_BIASES:
        raise BadRequest(
            f"{param} has {len(value)} tokens, the limit is {MAX_LOGIT_BIASES}", param=param
        )
    biases = dict[int, float]()
    for key, bias in value.items():
        number = key.isascii() and key.isdigit() and len(key) <= _MOST_DIGITS
        token = int(key) if number else -1
        if not 0 <= token < limits.vocab_size or token in biases:
            raise BadRequest(
                f"{param} must have token ids from 0 to {limits.vocab_size - 1} as its names, "
                f"each once, got {show(key)}",
                param=param,
            )
        right = is_integer(bias) or (isinstance(bias, float) and math.isfinite(bias))
        if not right or abs(bias) > LARGEST_BIAS:
            raise BadRequest(
                f"{param}[{show(key)}] must be a number from {-LARGEST_BIAS} to {LARGEST_BIAS}, "
                f"got {show(bias)}",
                param=param,
            )
        biases[token] = float(bias)
    return tuple((token, bias) for token, bias in sorted(biases.items()) if bias)
