"""How many KV blocks an engine gets, and what to do where they are too few. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from settings.config import GIB, EngineConfig
from settings.errors import ConfigError

CPU_BYTES = GIB
"""KV of an engine whose devices are cores, unless --num_blocks says otherwise."""


@dataclass(frozen=True, slots=True)
class KVNeeds:
    """What the KV cache of one device has to do with.

    Attributes:
        block_bytes: K and V of one block in all layers.
        step_bytes: what a step takes beside weights and KV: see `step_bytes`.
        sequence_blocks: blocks of one sequence of `max_model_len` tokens.
    """

    block_bytes: int
    step_bytes: int
    sequence_blocks: int
    max_model_len: int


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


def choose_blocks(device: Any, needs: KVNeeds, config: EngineConfig) -> int:
    """--num_blocks, or what fits into the memory that is left on `device`.

    The memory that a step takes is set aside before --hbm_utilization_factor is applied to the
    rest. CPU_BYTES where memory is not a device's own.

    Raises:
        ConfigError: one sequence of max_model_len does not fit; says how much is missing. Or the
            device does not say how much memory it has.
    """
    if config.num_blocks is not None:
        blocks, advice = config.num_blocks, "raise --num_blocks"
    elif not asks_device(device, config):
        blocks, advice = max(1, CPU_BYTES // needs.block_bytes), "raise --num_blocks"
    else:
        left = _bytes_left(device) - needs.step_bytes
        blocks = max(0, int(left * config.hbm_utilization_factor)) // needs.block_bytes
        advice = (
            f"raise --hbm_utilization_factor={config.hbm_utilization_factor} or "
            f"--tensor_parallel_size={config.tensor_parallel_size}, or set --kv_cache_dtype or "
            f"--quantization ({size_text(max(0, left))} are left after the weights and "
            f"{size_text(needs.step_bytes)} for a step)"
        )
    missing = needs.sequence_blocks - blocks
    if missing > 0:
        raise ConfigError(
            f"one sequence of max_model_len={needs.max_model_len} needs {needs.sequence_blocks} "
            f"KV blocks, there are {blocks}: {size_text(missing * needs.block_bytes)} are missing "
            f"on each device. Lower --max_model_len, or {advice}"
        )
    return blocks


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
