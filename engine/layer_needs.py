"""What KV a model's layers have to keep, and the blocks that take. Plain Python, no jax."""

from __future__ import annotations

from engine.kv_memory import KVNeeds, PoolNeeds
from engine.layer_groups import most_seen
from engine.limits import Limits
from engine.models.traits import Traits
from engine.types import Role
from settings.config import BatchSizes, EngineConfig


def reach_of(traits: Traits, config: EngineConfig, max_model_len: int) -> int | None:
    """How far back windowed layers keep KV; None: as far as others.

    They keep all where prompts begin with what the prefix cache finds, as its last tokens' windows
    may lie anywhere; and where no window ends before a sequence does.
    """
    reach = traits.reach
    if reach is None or reach >= max_model_len or config.enable_prefix_cache_hbm:
        return None
    return reach


def kv_needs(
    traits: Traits,
    reach: int | None,
    block_bytes: int,
    step_bytes: int,
    limits: Limits,
    sizes: BatchSizes,
    block_size: int,
    roles: Role,
) -> KVNeeds:
    """For `choose_blocks`; `block_bytes` are those of one block in all layers."""
    length = limits.max_model_len
    whole = -(-(length - 1) // block_size)
    if reach is None:
        return KVNeeds(PoolNeeds(block_bytes, whole), step_bytes, length)
    at_once = limits.max_batch_tokens if Role.PREFILL in roles else 1
    computing = most_seen(reach, block_size, at_once, length - 1)
    waiting = most_seen(reach, block_size, 1, length - 1) + 1  # to be decoded, or to be fetched
    if Role.DECODE in roles:
        enough = limits.max_seqs * waiting + limits.max_prefill_seqs * computing
    else:  # as many exported ones as one decode worker may wait for
        enough = limits.max_seqs * computing + sizes.max_decode_seqs * waiting
    layer_bytes = block_bytes // traits.layers
    windowed = PoolNeeds(layer_bytes * len(traits.windowed_layers), computing, enough)
    if not traits.whole_layers:
        return KVNeeds(windowed, step_bytes, length)
    return KVNeeds(
        PoolNeeds(layer_bytes * len(traits.whole_layers), whole), step_bytes, length, windowed
    )
