"""Token ids ↔ bytes of the wire."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from protos.errors import WireError

_TOKEN = np.dtype("<u4")


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return np.fromiter(tokens, dtype=_TOKEN).tobytes()


class _PromptPacker:
    """Packs prompts; the last one once, as it goes to two workers, and for each of its choices."""

    _last: tuple[tuple[int, ...], bytes] = (), b""

    def __call__(self, prompt: tuple[int, ...]) -> bytes:
        last, packed = self._last
        if prompt is not last:
            packed = pack_tokens(prompt)
            self._last = prompt, packed
        return packed


pack_prompt = _PromptPacker()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The inverse of `pack_tokens`.

    Raises:
        WireError: not a whole number of ids.
    """
    if len(data) % _TOKEN.itemsize:
        raise WireError(f"{len(data)} bytes are no whole number of token ids")
    return tuple(np.frombuffer(data, dtype=_TOKEN).tolist())
