"""config.json's rotary embeddings, in both spellings: all in rope_parameters, or rope_theta beside
rope_scaling (which may hold all as well, and is then what transformers takes)."""

from __future__ import annotations

import math

from engine.models.fields import Fields
from engine.models.traits import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    Scaling,
    UnsupportedModel,
    YarnScaling,
)

_ORIGINAL = "original_max_position_embeddings"


def rope_of(fields: Fields, head_dim: int, theta: float = 10000.0) -> Rope:
    """The rotary embedding of a configuration; `theta` where it gives none.

    Raises:
        UnsupportedModel: names the field.
    """
    parameters = fields.part("rope_scaling") or fields.part("rope_parameters") or Fields({})
    share = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    width = int(head_dim * share)
    if share > 1 or width % 2 or not width:
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor={share} of head_dim={head_dim} is no even part"
        )
    theta = parameters.number("rope_theta", fields.number("rope_theta", theta))
    return Rope(theta, width, scaling_of(parameters, fields, width))


def scaling_of(scaling: Fields, fields: Fields, width: int) -> Scaling | None:
    """The scaling that an object describes; `fields` is the configuration around it."""
    kind = scaling.raw("rope_type") or scaling.raw("type") or "default"
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(scaling.number("factor"))
        case "llama3":
            return _llama3(scaling)
        case "yarn":
            return _yarn(scaling, fields)
        case "longrope" | "su":
            return _longrope(scaling, fields, width)
    raise UnsupportedModel(
        f"config.json: rope_type={kind!r} is not supported "
        "(supported: default, linear, llama3, longrope, yarn)"
    )


def _llama3(scaling: Fields) -> Llama3Scaling:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high < low:
        raise UnsupportedModel(
            f"config.json: high_freq_factor={high} is below low_freq_factor={low}"
        )
    return Llama3Scaling(scaling.number("factor"), low, high, scaling.integer(_ORIGINAL))


def _yarn(scaling: Fields, fields: Fields) -> YarnScaling:
    original = _original(scaling, fields)
    factor = scaling.number("factor")

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    attention = grown(1.0)
    if scaling.raw("mscale") and scaling.raw("mscale_all_dim"):
        attention = grown(scaling.number("mscale")) / grown(scaling.number("mscale_all_dim"))
    return YarnScaling(
        factor,
        original,
        scaling.number("attention_factor", attention),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
    )


def _longrope(scaling: Fields, fields: Fields, width: int) -> LongRopeScaling:
    original = _original(scaling, fields)
    factor = scaling.number("factor", fields.integer("max_position_embeddings") / original)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        scaling.numbers("short_factor", width // 2),
        scaling.numbers("long_factor", width // 2),
        original,
        scaling.number("attention_factor", attention),
    )


def _original(scaling: Fields, fields: Fields) -> int:
    """The length that the model was trained for; Phi-3 has it beside the scaling."""
    if fields.raw(_ORIGINAL) is not None:
        return fields.integer(_ORIGINAL)
    if scaling.raw(_ORIGINAL) is not None:
        return scaling.integer(_ORIGINAL)
    return fields.integer("max_position_embeddings")
