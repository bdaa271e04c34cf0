"""What KV looks like on its way from one worker to another.

KV moves by *tokens*, not by blocks: the two ends may use other block sizes, and a
block of 2,048 tokens is larger than a chunk. A chunk is a list of arrays, one per
`ArraySpec`, each of shape [layers, tokens, heads, width] in C order.

Layers with a sliding window are windowed. A reader that lets go of what no window shows is sent
their KV of the last tokens alone: chunks before these hold the layers that see the whole context
(WHOLE_CONTEXT), and chunks from there on hold all (ALL_LAYERS).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import ml_dtypes  # noqa: F401  (teaches numpy the names bfloat16, float8_*, int4)
import numpy as np

ALL_LAYERS, WHOLE_CONTEXT = 0, 1
"""The groups of layers that a chunk may hold."""

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
    """Both ends must have layouts that fit (`serves`); compared before the first byte.

    Attributes:
        fingerprint: names the model and its numerics.
        arrays: the payload, in order.
        windowed_layers: so many of each array's layers are windowed.
        reach: an end keeps their KV of the `reach` positions that a query sees, its own among
            them; None: of all positions.

    Raises ValueError if there are no such layers.
    """

    fingerprint: str
    arrays: tuple[ArraySpec, ...]
    windowed_layers: int = 0
    reach: int | None = None

    def __post_init__(self) -> None:
        least = min((spec.layers for spec in self.arrays), default=0)
        if not 0 <= self.windowed_layers <= least:
            raise ValueError(f"{self.windowed_layers} windowed layers of {least}")
        if self.reach is not None and (self.reach < 1 or not self.windowed_layers):
            raise ValueError(f"reach {self.reach} of {self.windowed_layers} windowed layers")

    def serves(self, reader: KVLayout) -> bool:
        """Whether this end has all the KV that `reader` asks for."""
        return replace(self, reach=None) == replace(reader, reach=None) and (
            self.reach is None or self.reach == reader.reach
        )

    def handed_from(self, total: int) -> int:
        """The first of `total` tokens that chunks hold for a reader of this layout."""
        return 0 if self._has_whole_context else self._windowed_from(total)

    def group_at(self, start: int, total: int) -> tuple[int, int]:
        """What a chunk from token `start` on holds for a reader of this layout, and up to which
        token it may go."""
        seen = self._windowed_from(total)
        return (ALL_LAYERS, total) if start >= seen else (WHOLE_CONTEXT, seen)

    def part(self, group: int) -> KVLayout:
        """The layout of a group's chunks. Raises ValueError if there is no such group."""
        if group == ALL_LAYERS:
            return self
        if group != WHOLE_CONTEXT or self.reach is None or not self._has_whole_context:
            raise ValueError(f"there is no group {group}")
        return _whole_context(self)

    @property
    def _has_whole_context(self) -> bool:
        return all(spec.layers > self.windowed_layers for spec in self.arrays)

    def _windowed_from(self, total: int) -> int:
        # What the token after these sees.
        return 0 if self.reach is None else max(0, total - self.reach + 1)

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
        windows = ""
        if self.windowed_layers:
            kept = "all tokens" if self.reach is None else f"the last {self.reach} tokens"
            windows = f"; {kept} of {self.windowed_layers} windowed layers"
        return f"{self.fingerprint!r} ({arrays}{windows})"


@lru_cache(maxsize=64)
def _whole_context(layout: KVLayout) -> KVLayout:
    windowed = layout.windowed_layers
    arrays = tuple(replace(spec, layers=spec.layers - windowed) for spec in layout.arrays)
    return KVLayout(layout.fingerprint, arrays)
