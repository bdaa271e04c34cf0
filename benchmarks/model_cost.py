"""What a decoder must read and compute for its tokens, from its folder alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint.config import read_config
from checkpoint.weights import open_weights

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_ELEMENT_BYTES = 2  # of bfloat16, for weights and KV


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A decoder's matrices and KV, in bfloat16.

    Attributes:
        matmuls: (in, out) of the layers' matrices → how many there are of it.
        head: (in, out) of the output matrix.
        kv_width: KV heads times head_dim.
        query_width: query heads times head_dim.
    """

    matmuls: Mapping[tuple[int, int], int]
    head: tuple[int, int]
    layers: int
    kv_width: int
    query_width: int

    def decode_bytes(self, context: float) -> float:
        """Bytes that a step of one sequence at `context` reads: every matrix, and its KV."""
        kv = 2 * self.layers * self.kv_width * context
        return _ELEMENT_BYTES * (self._layer_elements + self.head[0] * self.head[1] + kv)

    def prompt_flops(self, tokens: int) -> float:
        """Floating-point operations up to the first token, attention included."""
        seen = tokens / 2  # each token sees those before it: half of them on average
        attention = 4.0 * self.layers * self.query_width * tokens * seen
        return 2.0 * (tokens * self._layer_elements + self.head[0] * self.head[1]) + attention

    @property
    def _layer_elements(self) -> int:
        return sum(into * out * count for (into, out), count in self.matmuls.items())


def model_cost(folder: Path) -> ModelCost:
    """Read a model folder of the Llama kind.

    Raises:
        CheckpointError: it has no readable configuration or weights.
    """
    shapes = {name: info.shape for name, info in open_weights(folder).names.items()}
    return cost_of(read_config(folder).raw, shapes)


def cost_of(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelCost:
    """Of the fields of config.json and the shapes [out, in] of the weights by name.

    The embedding is the output matrix where there is no other, else it is read by rows.
    """
    matmuls: Counter[tuple[int, int]] = Counter()
    for name, shape in shapes.items():
        if len(shape) == 2 and name not in (_EMBEDDING, _HEAD):
            out, into = shape
            matmuls[into, out] += 1
    vocab, hidden = shapes.get(_HEAD, shapes[_EMBEDDING])
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    return ModelCost(
        matmuls=dict(matmuls),
        head=(hidden, vocab),
        layers=config["num_hidden_layers"],
        kv_width=width * config.get("num_key_value_heads", heads),
        query_width=width * heads,
    )
