"""What the one decoder computes: every difference between models, as plain values.

engine.models.families makes them from a `config.json`; nothing else decides by model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.kernels.activation import Activation
from engine.models.stored import STANDARD, Stored


class UnsupportedModel(ValueError):
    """The configuration asks for something this engine does not compute."""


# ---- rotary embeddings ----


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: slow waves are stretched, fast ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023).

    Attributes:
        beta_fast, beta_slow: turns within the original length from which on a wave is kept, and
            up to which it is stretched by `factor`.
        attention_factor: multiplies cosines and sines.
        truncate: the bounds between the waves are rounded outwards to whole dimensions.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024): each wave has a factor of its own.

    `long_factors` hold for models that serve more than `original_max_position` tokens, else
    `short_factors`. transformers chooses by the length of each sequence; here it is chosen once,
    as KV that was computed by one set is wrong beside the other. `attention_factor` multiplies
    cosines and sines.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings.

    Attributes:
        theta: base of the waves' lengths.
        width: leading dimensions of a head that are turned; even.
        scaling: None for waves as `theta` makes them.
    """

    theta: float
    width: int
    scaling: Scaling | None = None


# ---- layers ----


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries grow with their position p: by 1 + scale * log(1 + floor((p + 1) / floor))."""

    floor: float
    scale: float


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What differs from layer to layer.

    Attributes:
        rope: which of `Traits.ropes`; None leaves queries and keys as they are.
        window, chunk: as in engine.kernels.interface.AttentionSpec.
        head_norm: queries and keys are normed, each head by itself, before they are rotated.
        temperature: None for queries of one scale.
        experts: the MLP is one of routed experts.
    """

    rope: int | None = 0
    window: int | None = None
    chunk: int | None = None
    head_norm: bool = False
    temperature: Temperature | None = None
    experts: bool = False

    @property
    def reach(self) -> int | None:
        """Positions that a query sees at most, its own among them; None is no limit."""
        return min((n for n in (self.window, self.chunk) if n is not None), default=None)


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLPs that a router chooses from.

    Attributes:
        count: experts of a layer; `top_k` of them see each token.
        ffn: width of each.
        scores: "softmax" over all experts; "sigmoid" of each chosen one's own score.
        normed: the chosen experts' scores are divided by their sum.
        scale_input: scores multiply what the experts see, not what they answer.
        shared_ffn: width of an MLP that sees every token beside them; None where there is none.
    """

    count: int
    top_k: int
    ffn: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normed: bool = True
    scale_input: bool = False
    shared_ffn: int | None = None


@dataclass(frozen=True, slots=True)
class Traits:
    """A model, or one shard of it.

    Attributes:
        heads, kv_heads: query and key/value heads; kv_heads divides heads.
        head_dim: width of one head; may differ from hidden / heads.
        ffn: width of the gated MLP of the layers without experts.
        kinds: each layer's kind.
        ropes: the rotary embeddings that the layers choose from.
        score_scale: multiplies the attention scores.
        attention_soft_cap, logit_soft_cap: see AttentionSpec; the same for the logits.
        post_norms: the results of attention and MLP are normed before they are added.
        head_norm_weights: the norms of heads have weights.
        embedding_scale: multiplies the embedding, rounded to the activations' dtype; None is 1.
        experts: None where no layer has any.
        tied: the output projection is the embedding.
        stored: how its checkpoints keep the weights.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    kinds: tuple[LayerKind, ...]
    ropes: tuple[Rope, ...]
    score_scale: float
    tied: bool
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    post_norms: bool = False
    head_norm_weights: bool = True
    embedding_scale: float | None = None
    experts: Experts | None = None
    stored: Stored = STANDARD

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def whole_layers(self) -> tuple[int, ...]:
        """The layers that see the whole context."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind.reach is None)

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The others."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind.reach is not None)

    @property
    def reach(self) -> int | None:
        """The widest of the windowed layers; None where there are none."""
        return max((k.reach for k in self.kinds if k.reach is not None), default=None)

    @property
    def mlp_width(self) -> int:
        """Widths of all MLPs that one token sees in one layer; the largest of any."""
        dense = [0 if kind.experts else self.ffn for kind in self.kinds]
        e = self.experts
        return max(*dense, e.top_k * e.ffn + (e.shared_ffn or 0) if e else 0)
