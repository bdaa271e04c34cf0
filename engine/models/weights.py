"""One declaration per weight: shape, logical axes, init, and its name in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.traits import Traits


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the decoder.

    Attributes:
        shape: as the decoder uses it; layer weights have the layers in front.
        axes: logical axis of each dimension, see engine.sharding.
        source: tensor name in a Hugging Face checkpoint; `{}` is the layer.
        source_shape: shape there, of one layer.
        transposed: the checkpoint has [out, in] and the decoder wants [in, out].
        init: "normal", "ones" or "zeros", for `--load_format dummy`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    source: str
    source_shape: tuple[int, ...]
    transposed: bool = False
    init: str = "normal"

    @property
    def layered(self) -> bool:
        return "{}" in self.source

    def source_names(self) -> list[str]:
        """Checkpoint tensors that make up this weight, in layer order."""
        if self.layered:
            return [self.source.format(layer) for layer in range(self.shape[0])]
        return [self.source]


IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from config.json."""


def declare_weights(traits: Traits) -> dict[str, Weight]:
    """Every weight of the decoder, by its name in the parameter tree."""
    t = traits
    q, kv = t.heads * t.head_dim, t.kv_heads * t.head_dim

    def linear(source: str, rows: int, columns: int, axes: tuple[str, str]) -> Weight:
        return Weight(
            (t.layers, rows, columns),
            ("layer", *axes),
            f"model.layers.{{}}.{source}.weight",
            (columns, rows),
            transposed=True,
        )

    def vector(source: str, width: int, axis: str, init: str) -> Weight:
        return Weight(
            (t.layers, width), ("layer", axis), f"model.layers.{{}}.{source}", (width,), init=init
        )

    weights = {
        "embedding": Weight(
            (t.vocab, t.hidden),
            ("vocab", "hidden"),
            "model.embed_tokens.weight",
            (t.vocab, t.hidden),
        ),
        "attention_norm": vector("input_layernorm.weight", t.hidden, "hidden", "ones"),
        "q": linear("self_attn.q_proj", t.hidden, q, ("hidden", "heads")),
        "k": linear("self_attn.k_proj", t.hidden, kv, ("hidden", "kv_heads")),
        "v": linear("self_attn.v_proj", t.hidden, kv, ("hidden", "kv_heads")),
        "o": linear("self_attn.o_proj", q, t.hidden, ("heads", "hidden")),
        "mlp_norm": vector("post_attention_layernorm.weight", t.hidden, "hidden", "ones"),
        "gate": linear("mlp.gate_proj", t.hidden, t.ffn, ("hidden", "ffn")),
        "up": linear("mlp.up_proj", t.hidden, t.ffn, ("hidden", "ffn")),
        "down": linear("mlp.down_proj", t.ffn, t.hidden, ("ffn", "hidden")),
        "final_norm": Weight(
            (t.hidden,), ("hidden",), "model.norm.weight", (t.hidden,), init="ones"
        ),
    }
    if t.qkv_bias:
        weights["q_bias"] = vector("self_attn.q_proj.bias", q, "heads", "zeros")
        weights["k_bias"] = vector("self_attn.k_proj.bias", kv, "kv_heads", "zeros")
        weights["v_bias"] = vector("self_attn.v_proj.bias", kv, "kv_heads", "zeros")
    if t.output_bias:
        weights["o_bias"] = vector("self_attn.o_proj.bias", t.hidden, "hidden", "zeros")
    if t.mlp_bias:
        weights["gate_bias"] = vector("mlp.gate_proj.bias", t.ffn, "ffn", "zeros")
        weights["up_bias"] = vector("mlp.up_proj.bias", t.ffn, "ffn", "zeros")
        weights["down_bias"] = vector("mlp.down_proj.bias", t.hidden, "hidden", "zeros")
    if not t.tied:
        weights["head"] = Weight(
            (t.vocab, t.hidden), ("vocab", "hidden"), "lm_head.weight", (t.vocab, t.hidden)
        )
    return weights
