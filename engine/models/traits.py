"""Every difference between models, decided here from `config.json` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UnsupportedModel(ValueError):
    """The configuration asks for something this engine does not compute."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling (Hugging Face rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class Traits:
    """What the one decoder computes.

    Attributes:
        heads, kv_heads: query and key/value heads; kv_heads divides heads.
        head_dim: width of one head; may differ from hidden / heads.
        ffn: width of the gated MLP.
        rope_scaling: None for plain rotary embeddings, else a factor (linear) or
            Llama 3's scaling.
        tied: the output projection is the embedding.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope_theta: float
    rope_scaling: float | Llama3Scaling | None
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool


_REQUIRED = object()


class Fields:
    """Typed access to config.json that names the field in its errors."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModel(f"config.json: {name}={value!r} is not a positive integer")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UnsupportedModel(f"config.json: {name}={value!r} is not a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"config.json: {name}={value!r} is not true or false")
        return value

    def raw(self, name: str) -> Any:
        return self._raw.get(name)

    def _get(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        if value is None:
            if default is _REQUIRED:
                raise UnsupportedModel(f"config.json: the field {name!r} is missing")
            return default
        return value


def _rope(config: Fields) -> tuple[float, float | Llama3Scaling | None]:
    """(theta, scaling) from either spelling: rope_parameters, or rope_theta + rope_scaling."""
    parameters = config.raw("rope_parameters") or {}
    scaling = config.raw("rope_scaling") or parameters
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise UnsupportedModel("config.json: rope_parameters or rope_scaling is not an object")
    theta = Fields(parameters).number("rope_theta", config.raw("rope_theta") or 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    fields = Fields(scaling)
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, fields.number("factor")
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            raise UnsupportedModel(
                f"config.json: high_freq_factor={high} is not above low_freq_factor={low}"
            )
        original = fields.integer("original_max_position_embeddings")
        return theta, Llama3Scaling(fields.number("factor"), low, high, original)
    raise UnsupportedModel(
        f"config.json: rope_type={kind!r} is not supported (supported: default, linear, llama3)"
    )


def llama(config: Fields) -> Traits:
    """The traits of a Llama."""
    if (activation := config.raw("hidden_act") or "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"config.json: hidden_act={activation!r} is not silu")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"config.json: num_key_value_heads={kv_heads} does not divide "
            f"num_attention_heads={heads}"
        )
    if config.raw("head_dim") is None and hidden % heads:
        raise UnsupportedModel(
            f"config.json: num_attention_heads={heads} does not divide hidden_size={hidden}, "
            "and head_dim is missing"
        )
    head_dim = config.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedModel(
            f"config.json: head_dim={head_dim} is odd, rotary embeddings turn pairs"
        )
    theta, scaling = _rope(config)
    attention_bias = config.flag("attention_bias", False)
    return Traits(
        hidden=hidden,
        layers=config.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=config.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
