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

    A query head is on the shard of its KV head. KV heads are replicated where one is wanted on
    several shards, each with its part of the query heads. Where that does not divide, heads of
    zeros fill up: they cost time, so at most a third may be added to the query heads.

    Raises:
        UnsupportedParallelism: the heads cannot be divided so.
    """
    group = heads // kv_heads
    # The fewest KV heads on a shard, as they take up the pool; then the fewest query heads.
    for per_shard in range(-(-kv_heads // shards), kv_heads + 1):
        places = per_shard * shards
        for queries in range(1, group + 1):
            replicas = -(-group // queries)
            if replicas * kv_heads <= places and places * queries * 3 <= heads * 4:
                return _fill(heads, kv_heads, places, queries, replicas)
    raise UnsupportedParallelism(
        f"--tensor_parallel_size={shards} does not divide {heads} query heads and {kv_heads} KV "
        f"heads: more than {heads // 3} empty query heads would be needed"
    )


def _fill(heads: int, kv_heads: int, places: int, queries: int, replicas: int) -> HeadLayout:
    """`places` KV heads with `queries` query heads each, as many empty ones as are left over."""
    group = heads // kv_heads
    q: list[int] = []
    for head in range(kv_heads):
        own = [*range(head * group, (head + 1) * group)]
        q += own + [NO_HEAD] * (replicas * queries - group)
    kv = [head for head in range(kv_heads) for _ in range(replicas)]
    q += [NO_HEAD] * (places * queries - len(q))
    return HeadLayout(tuple(q), (*kv, *[NO_HEAD] * (places - len(kv))))
