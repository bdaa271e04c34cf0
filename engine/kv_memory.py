"""How many KV blocks an engine gets, and what to do where they are too few. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from settings.config import GIB, EngineConfig
from settings.errors import ConfigError

CPU_BYTES = GIB
"""KV of an engine whose devices are cores, unless --num_blocks says otherwise."""


@dataclass(frozen=True, slots=True)
class PoolNeeds:
    """What one pool has to do with.

    Attributes:
        block_bytes: K and V of one block in all its layers.
        sequence_blocks: blocks of one sequence of `max_model_len` tokens, at most.
        enough: more blocks than these would never be used; None where more hold more sequences.
    """

    block_bytes: int
    sequence_blocks: int
    enough: int | None = None


@dataclass(frozen=True, slots=True)
class KVNeeds:
    """What the KV cache of one device has to do with.

    Attributes:
        pool: of all layers, or of those that see the whole context.
        step_bytes: what a step takes beside weights and KV: see `step_bytes`.
        windowed: of the windowed layers, where they have a pool beside the others'.
    """

    pool: PoolNeeds
    step_bytes: int
    max_model_len: int
    windowed: PoolNeeds | None = None

    def split(self, size: int) -> tuple[int, int]:
        """Blocks of the pool and windowed ones that `size` bytes hold.

        The windowed layers get no more than they can use, and no more blocks than the others; but
        first one whole sequence has room.
        """
        own, other = self.pool, self.windowed
        if other is None:
            blocks = size // own.block_bytes
            return (blocks if own.enough is None else min(blocks, own.enough)), 0
        left = size - own.sequence_blocks * own.block_bytes
        windowed = min(
            self.windowed_beside(size // (own.block_bytes + other.block_bytes)),
            max(left // other.block_bytes, other.sequence_blocks),
        )
        return max(0, size - windowed * other.block_bytes) // own.block_bytes, windowed

    def windowed_beside(self, blocks: int) -> int:
        """Windowed blocks beside so many others, where memory is not what bounds them."""
        if self.windowed is None:
            return 0
        most = blocks if self.windowed.enough is None else min(blocks, self.windowed.enough)
        return max(most, self.windowed.sequence_blocks)


def step_bytes(
    *, tokens: int, rows: int, slots: int, width: int, vocab: int, chunk_bytes: int
) -> int:
    """An upper estimate of what a step takes on one device, in bytes.

    Args:
        tokens, rows: of the largest program.
        slots: rows of the penalty counts, which are int32 [slots, vocab].
        width: the widths of all that one layer computes for a token, added up.
        chunk_bytes: KV of one chunk, which is exported and imported.
    """
    logits = 4 * rows * vocab * 4  # as they come, penalised, scaled, and with noise
    return 4 * slots * vocab + 4 * tokens * width + logits + 2 * chunk_bytes


def choose_blocks(device: Any, needs: KVNeeds, config: EngineConfig) -> tuple[int, int]:
    """--num_blocks, or what fits into the memory that is left on `device`; and how many blocks the
    windowed layers' pool has beside, 0 where there is none.

    The memory that a step takes is set aside before --hbm_utilization_factor is applied to the
    rest. CPU_BYTES where memory is not a device's own.

    Raises:
        ConfigError: one sequence of max_model_len does not fit; says how much is missing. Or the
            device does not say how much memory it has.
    """
    if config.num_blocks is not None:
        blocks, advice = config.num_blocks, "raise --num_blocks"
        windowed = needs.windowed_beside(blocks)
    elif not asks_device(device, config):
        (blocks, windowed), advice = needs.split(CPU_BYTES), "raise --num_blocks"
        blocks = max(1, blocks)
    else:
        left = _bytes_left(device) - needs.step_bytes
        blocks, windowed = needs.split(max(0, int(left * config.hbm_utilization_factor)))
        advice = (
            f"raise --hbm_utilization_factor={config.hbm_utilization_factor} or "
            f"--tensor_parallel_size={config.tensor_parallel_size}, or set --kv_cache_dtype or "
            f"--quantization ({size_text(max(0, left))} are left after the weights and "
            f"{size_text(needs.step_bytes)} for a step)"
        )
    pool = needs.pool
    missing = pool.sequence_blocks - blocks
    if missing > 0:
        raise ConfigError(
            f"one sequence of max_model_len={needs.max_model_len} needs {pool.sequence_blocks} "
            f"KV blocks, there are {blocks}: {size_text(missing * pool.block_bytes)} are missing "
            f"on each device. Lower --max_model_len, or {advice}"
        )
    return blocks, windowed


def asks_device(device: Any, config: EngineConfig) -> bool:
    """Whether `choose_blocks` depends on the memory that is left on `device`."""
    return config.num_blocks is None and device.platform != "cpu"


def _bytes_left(device: Any) -> int:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats or "bytes_in_use" not in stats:
        raise ConfigError(
            f"{device.platform} devices do not say how much memory they have: give --num_blocks"
        )
    return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])


def size_text(size: int) -> str:
    """A number of bytes, for a person."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / 2**20:.2f} MiB"
