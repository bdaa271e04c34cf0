"""How attention heads are laid out over the shards of a tensor-parallel model."""

from __future__ import annotations

from dataclasses import dataclass


class UnsupportedParallelism(ValueError):
    """The model does not divide among the shards; names the flag, the sizes and the limit."""


NO_HEAD = -1


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The heads of all shards, one shard after the other; each shard has equally many.

    Attributes:
        q, kv: the model's head at each place, or NO_HEAD for a head of zeros.
    """

    q: tuple[int, ...]
    kv: tuple[int, ...]

    def kv_places(self, kv_heads: int) -> tuple[int, ...]:
        """The place of each of the model's KV heads (the first one of replicated heads)."""
        return tuple(self.kv.index(head) for head in range(kv_heads))


def lay_out_heads(heads: int, kv_heads: int, shards: int) -> HeadLayout:
    """Divide `heads` query heads and `kv_heads` KV heads among `shards`.

    A query head is on the shard of its KV head. Fewer KV heads than shards are replicated.
    Where neither divides the other, heads of zeros fill up: they cost memory and time, so at
    most a third may be added.

    Raises:
        UnsupportedParallelism: the heads cannot be divided so.
    """
    group = heads // kv_heads
    every = tuple(range(heads))
    if kv_heads % shards == 0:
        return HeadLayout(every, tuple(range(kv_heads)))
    if shards % kv_heads == 0 and heads % shards == 0:
        return HeadLayout(every, tuple(place * kv_heads // shards for place in range(shards)))
    padded = -(-kv_heads // shards) * shards
    if (padded - kv_heads) * 3 > kv_heads:
        raise UnsupportedParallelism(
            f"--tensor_parallel_size={shards} does not divide {heads} query heads and "
            f"{kv_heads} KV heads: {padded - kv_heads} empty KV heads would be needed, at most "
            f"{kv_heads // 3} are allowed"
        )
    empty = (NO_HEAD,) * (padded - kv_heads)
    return HeadLayout(every + empty * group, (*range(kv_heads), *empty))
