"""Names of cached KV blocks: 64-bit hashes, each over the tokens from the first on.

A block's hash covers the one before it and the block's own tokens, and the first one a root:
the model's fingerprint (ModelLimits.fingerprint, which a worker's welcome states) and the
adapter. So equal hashes mean equal KV, up to collisions: whoever reads KV by a hash compares the
tokens. No jax here: the router computes the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash


def root_hash(fingerprint: bytes, adapter: str = "") -> int:
    """What comes before the first block: unsigned 64 bits.

    Args:
        fingerprint: of the model and its numerics, as the worker states it.
        adapter: id of the LoRA adapter; "" for the model alone.
    """
    # The length keeps ("a", "bc") apart from ("ab", "c").
    length = len(fingerprint).to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(length + fingerprint + adapter.encode())


def block_hashes(tokens: Sequence[int], block_size: int, root: int) -> list[int]:
    """The hashes of the full blocks of `tokens`, in order, each unsigned 64 bits.

    Args:
        tokens: token ids from the first one on, below 2^31; int32 little-endian in the hash.
        root: see `root_hash`; or the hash of the block before tokens[0], to go on from there.
    """
    return chain_hashes(block_pieces(tokens, block_size), root)


def block_pieces(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The full blocks of `tokens`, each as int32 little-endian."""
    full, width = len(tokens) // block_size, 4 * block_size
    data = np.asarray(tokens[: full * block_size], "<i4").tobytes()
    return [data[at : at + width] for at in range(0, len(data), width)]


def chain_hashes(pieces: Iterable[bytes], root: int) -> list[int]:
    """As `block_hashes`, of blocks that `block_pieces` has made."""
    hashes = []
    for piece in pieces:
        hasher = xxhash.xxh3_64(root.to_bytes(8, "little"))
        hasher.update(piece)
        root = hasher.intdigest()
        hashes.append(root)
    return hashes
