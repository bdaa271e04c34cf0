"""One declaration per weight: shape, logical axes, init, and its names in a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from engine.models.stored import STANDARD_NAMES, Part
from engine.models.traits import Traits


class Kind(Enum):
    """What a weight is to the kernels."""

    VECTOR = auto()
    """[layers, width], or [1, width]: norms."""
    LINEAR = auto()
    """The matrix of a matmul, [out, in] in a checkpoint."""
    ROUTER = auto()
    """The same, of scores that experts are chosen by: never quantized."""
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
        source: name of its tensors; `{layer}` and `{expert}` are numbers.
        shape: of one tensor.
        axes: logical axis of each dimension of it, see engine.sharding.
        init: "normal", "ones" or "zeros", for `--load_format dummy`.
        layers: those that have it; () where it belongs to none.
        experts: tensors of one layer, one for each expert; 0 for one that belongs to none.
        wide: float32, whatever the dtype of the activations.
    """

    kind: Kind
    source: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str = "normal"
    layers: tuple[int, ...] = ()
    experts: int = 0
    wide: bool = False

    @property
    def stack(self) -> tuple[int, ...]:
        """How its tensors lie in the decoder's array: [layers] or [layers, experts] of them."""
        layers = max(1, len(self.layers))
        return (layers, self.experts) if self.experts else (layers,)

    def places(self) -> list[tuple[int, int]]:
        """(layer, expert) of each tensor, in the order of the array."""
        experts = range(max(1, self.experts))
        return [(layer, expert) for layer in self.layers or (0,) for expert in experts]

    def source_names(self) -> list[str]:
        """Tensors that make up this weight, as the decoder calls them, in the same order."""
        return [self.source.format(layer=layer, expert=expert) for layer, expert in self.places()]

    @property
    def parameters(self) -> int:
        return math.prod((*self.stack, *self.shape))


def bias_of(name: str) -> str:
    """The name of the bias of matmul `name`."""
    return f"{name}_bias"


_MATMULS = {
    "q": ("heads", "hidden"),
    "k": ("kv_heads", "hidden"),
    "v": ("kv_heads", "hidden"),
    "o": ("hidden", "heads"),
    "gate": ("ffn", "hidden"),
    "up": ("ffn", "hidden"),
    "down": ("hidden", "ffn"),
}
"""Matmul → the axes of its outputs and inputs; experts' are called as those of the MLP."""


def declare_weights(traits: Traits) -> dict[str, Weight]:
    """Every weight of the decoder, by its name in the parameter tree."""
    t = traits
    sizes = {
        "hidden": t.hidden,
        "heads": t.heads * t.head_dim,
        "kv_heads": t.kv_heads * t.head_dim,
        "head_dim": t.head_dim,
        "ffn": t.ffn,
        "vocab": t.vocab,
    }
    every = tuple(range(t.layers))
    dense = tuple(layer for layer in every if not t.kinds[layer].experts)
    routed = tuple(layer for layer in every if t.kinds[layer].experts)
    weights: dict[str, Weight] = {}

    def norm(name: str, axis: str = "hidden", layers: tuple[int, ...] = every) -> None:
        source = f"{STANDARD_NAMES[name]}.weight"
        # 1 + w does not fit into the dtype of w.
        wide = bool(t.stored.norm_offset)
        weights[name] = Weight(
            Kind.VECTOR, source, (sizes[axis],), (axis,), "ones", layers, wide=wide
        )

    def matmul(
        name: str,
        axes: tuple[str, str],
        layers: tuple[int, ...],
        bias: bool = False,
        experts: int = 0,
        kind: Kind = Kind.LINEAR,
        **different: int,
    ) -> None:
        out, into = ((sizes | different)[axis] for axis in axes)
        source = STANDARD_NAMES[name]
        weights[name] = Weight(
            kind, f"{source}.weight", (out, into), axes, layers=layers, experts=experts
        )
        if bias:
            weights[bias_of(name)] = Weight(
                Kind.BIAS, f"{source}.bias", (out,), axes[:1], "zeros", layers
            )

    norm("attention_norm")
    norm("mlp_norm")
    norm("final_norm", layers=())
    if t.post_norms:
        norm("attention_post_norm")
        norm("mlp_post_norm")
    if t.head_norm_weights and any(kind.head_norm for kind in t.kinds):
        norm("q_norm", "head_dim")
        norm("k_norm", "head_dim")
    for name in "qkv":
        matmul(name, _MATMULS[name], every, t.qkv_bias)
    matmul("o", _MATMULS["o"], every, t.output_bias)
    mlp = ("gate", "up", "down")
    if dense:
        for name in mlp:
            matmul(name, _MATMULS[name], dense, t.mlp_bias)
    if routed and (e := t.experts):
        matmul("router", ("expert", "hidden"), routed, kind=Kind.ROUTER, expert=e.count)
        for name in mlp:
            matmul(f"expert_{name}", _MATMULS[name], routed, experts=e.count, ffn=e.ffn)
            if e.shared_ffn:
                matmul(f"shared_{name}", _MATMULS[name], routed, ffn=e.shared_ffn)
    vocabulary = (t.vocab, t.hidden), ("vocab", "hidden")
    embedding = f"{STANDARD_NAMES['embedding']}.weight"
    if t.tied:
        weights["head"] = Weight(Kind.HEAD, embedding, *vocabulary)
    else:
        weights["embedding"] = Weight(Kind.EMBEDDING, embedding, *vocabulary)
        weights["head"] = Weight(Kind.HEAD, f"{STANDARD_NAMES['head']}.weight", *vocabulary)
    return weights


def parameter_count(traits: Traits) -> int:
    """How many parameters a model has; a tied embedding counts once."""
    return sum(weight.parameters for weight in declare_weights(traits).values())


def stored_parts(traits: Traits) -> dict[str, Part]:
    """Where the checkpoints of this family keep each of the decoder's tensors, by its name."""
    declared = declare_weights(traits)
    return {
        source: _part(traits, declared, name, layer, expert)
        for name, weight in declared.items()
        for source, (layer, expert) in zip(weight.source_names(), weight.places(), strict=True)
    }


def _part(traits: Traits, declared: dict[str, Weight], name: str, layer: int, expert: int) -> Part:
    weight, stored = declared[name], traits.stored
    matmul = name.removesuffix("_bias")
    # A tied head is read as the embedding.
    module = stored.names["embedding" if name == "head" and traits.tied else matmul]
    tensor = module.format(layer=layer, expert=expert)
    joined = [other for other, its in stored.names.items() if its == module and other in declared]
    outputs = {other: declared[other].shape[0] for other in joined}
    first = sum(outputs[other] for other in joined[: joined.index(matmul)]) if joined else 0
    cut = slice(first, first + weight.shape[0])
    total = sum(outputs.values()) or weight.shape[0]
    if weight.experts and "{expert}" not in module:
        shape = (weight.experts, weight.shape[1], total)
        return Part(tensor, shape, (expert, slice(None), cut), turned=True)
    suffix = ".bias" if weight.kind is Kind.BIAS else ".weight"
    return Part(
        tensor + suffix,
        (total, *weight.shape[1:]),
        (cut,) if total != weight.shape[0] else (),
        pairs=traits.head_dim if stored.interleaved and matmul in ("q", "k") else 0,
        offset=stored.norm_offset if weight.kind is Kind.VECTOR else 0.0,
    )
