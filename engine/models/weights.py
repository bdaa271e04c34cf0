"""One declaration per weight: shape, logical axes, init, and its name in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from engine.models.traits import Traits


class Kind(Enum):
    """What a weight is to the kernels."""

    VECTOR = auto()
    """[layers, width], or [1, width]: norms."""
    LINEAR = auto()
    """The matrix of a matmul, [out, in] in a checkpoint."""
    BIAS = auto()
    """[out], of the matmul whose name it extends."""
    EMBEDDING = auto()
    """[vocab, hidden], whose rows are taken."""
    HEAD = auto()
    """[vocab, hidden], the output projection; its rows are taken too if it is tied."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the decoder.

    Attributes:
        source: tensor name in a Hugging Face checkpoint; `{}` is the layer.
        shape: of that tensor, that is of one layer.
        axes: logical axis of each dimension of it, see engine.sharding.
        init: "normal", "ones" or "zeros", for `--load_format dummy`.
    """

    kind: Kind
    source: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str = "normal"

    @property
    def layered(self) -> bool:
        return "{}" in self.source

    def source_names(self, layers: int) -> list[str]:
        """Checkpoint tensors that make up this weight, in layer order."""
        if self.layered:
            return [self.source.format(layer) for layer in range(layers)]
        return [self.source]


IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from config.json."""


def bias_of(name: str) -> str:
    """The name of the bias of matmul `name`."""
    return f"{name}_bias"


def declare_weights(traits: Traits) -> dict[str, Weight]:
    """Every weight of the decoder, by its name in the parameter tree."""
    t = traits
    sizes = {
        "hidden": t.hidden,
        "heads": t.heads * t.head_dim,
        "kv_heads": t.kv_heads * t.head_dim,
        "ffn": t.ffn,
        "vocab": t.vocab,
    }

    def declare(kind: Kind, source: str, *axes: str, init: str = "normal") -> Weight:
        return Weight(kind, source, tuple(sizes[axis] for axis in axes), axes, init)

    def norm(source: str) -> Weight:
        return declare(Kind.VECTOR, source, "hidden", init="ones")

    weights = {
        "attention_norm": norm("model.layers.{}.input_layernorm.weight"),
        "mlp_norm": norm("model.layers.{}.post_attention_layernorm.weight"),
        "final_norm": norm("model.norm.weight"),
    }
    matmuls = (
        ("q", "self_attn.q_proj", "heads", "hidden", t.qkv_bias),
        ("k", "self_attn.k_proj", "kv_heads", "hidden", t.qkv_bias),
        ("v", "self_attn.v_proj", "kv_heads", "hidden", t.qkv_bias),
        ("o", "self_attn.o_proj", "hidden", "heads", t.output_bias),
        ("gate", "mlp.gate_proj", "ffn", "hidden", t.mlp_bias),
        ("up", "mlp.up_proj", "ffn", "hidden", t.mlp_bias),
        ("down", "mlp.down_proj", "hidden", "ffn", t.mlp_bias),
    )
    for name, source, out, into, has_bias in matmuls:
        source = f"model.layers.{{}}.{source}"
        weights[name] = declare(Kind.LINEAR, f"{source}.weight", out, into)
        if has_bias:
            weights[bias_of(name)] = declare(Kind.BIAS, f"{source}.bias", out, init="zeros")
    embedding = "model.embed_tokens.weight"
    if t.tied:
        weights["head"] = declare(Kind.HEAD, embedding, "vocab", "hidden")
    else:
        weights["embedding"] = declare(Kind.EMBEDDING, embedding, "vocab", "hidden")
        weights["head"] = declare(Kind.HEAD, "lm_head.weight", "vocab", "hidden")
    return weights
