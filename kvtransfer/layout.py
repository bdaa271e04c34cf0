"""What KV looks like on its way from one worker to another.

KV moves by *tokens*, not by blocks: the two ends may use other block sizes, and a
block of 2,048 tokens is larger than a chunk. A chunk is a list of arrays, one per
`ArraySpec`, each of shape [layers, tokens, heads, width] in C order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of the payload (K, V; later scales), per token.

    `dtype` is a numpy or ml_dtypes name. `heads` counts logical KV heads, whatever
    the tensor parallelism of either end.
    """

    name: str
    dtype: str
    layers: int
    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Both ends must have equal layouts; it is compared before the first byte.

    `fingerprint` names the model and its numerics; `arrays` the payload, in order.
    """

    fingerprint: str
    arrays: tuple[ArraySpec, ...]
