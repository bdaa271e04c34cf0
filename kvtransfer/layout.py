"""What KV looks like on its way from one worker to another.

KV moves by *tokens*, not by blocks: the two ends may use other block sizes, and a
block of 2,048 tokens is larger than a chunk. A chunk is a list of arrays, one per
`ArraySpec`, each of shape [layers, tokens, heads, width] in C order.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (teaches numpy the names bfloat16, float8_*, int4)
import numpy as np

ALIGNMENT = 64
"""Arrays in shared memory start at multiples of this; JAX aliases nothing less aligned."""


def align_up(size: int) -> int:
    """`size` rounded up to the next multiple of `ALIGNMENT`, in bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of the payload (K, V; later scales), per token.

    `dtype` is a numpy or ml_dtypes name. `heads` counts logical KV heads, whatever
    the tensor parallelism of either end. Raises ValueError if a field makes no sense.
    """

    name: str
    dtype: str
    layers: int
    heads: int
    width: int

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width) < 1:
            raise ValueError(f"array {self.name!r}: layers, heads and width must be at least 1")
        try:
            known = not np.dtype(self.dtype).hasobject
        except TypeError:
            known = False
        if not known:
            raise ValueError(f"array {self.name!r}: unknown dtype {self.dtype!r}")

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype)

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.heads * self.width * self.numpy_dtype.itemsize

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        """The array's shape in a chunk of `tokens` tokens."""
        return (self.layers, tokens, self.heads, self.width)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Both ends must have equal layouts; it is compared before the first byte.

    `fingerprint` names the model and its numerics; `arrays` the payload, in order.
    """

    fingerprint: str
    arrays: tuple[ArraySpec, ...]

    @property
    def layers(self) -> int:
        """Layers of the deepest array."""
        return max((spec.layers for spec in self.arrays), default=0)

    @property
    def heads(self) -> int:
        """Heads of the widest array."""
        return max((spec.heads for spec in self.arrays), default=0)

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes that one token has over all arrays and layers."""
        return sum(spec.bytes_per_token for spec in self.arrays)

    def slot_bytes(self, tokens: int) -> int:
        """Bytes of shared memory for a chunk of `tokens` tokens, each array aligned."""
        return sum(align_up(spec.bytes_per_token * tokens) for spec in self.arrays)

    def describe(self) -> str:
        """The layout on one line, for error messages."""
        arrays = ", ".join(
            f"{spec.name} {spec.dtype}[{spec.layers} layers, {spec.heads} heads, {spec.width}]"
            for spec in self.arrays
        )
        return f"{self.fingerprint!r} ({arrays})"
