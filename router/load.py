"""The load of all workers together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Sums over the open workers; every one of `total_blocks` is of one of the four kinds."""

    running: int
    waiting: int
    compiles: int
    free_blocks: int
    cached_blocks: int
    running_blocks: int
    exported_blocks: int
    total_blocks: int

    @property
    def unaccounted_blocks(self) -> int:
        """Blocks that nobody owns, or, below 0, that two do; 0 in sound workers."""
        known = self.free_blocks + self.cached_blocks + self.running_blocks + self.exported_blocks
        return self.total_blocks - known

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1; cached ones can be had and are not in use."""
        used = self.running_blocks + self.exported_blocks
        blocks = used + self.free_blocks + self.cached_blocks
        return used / blocks if blocks else 0.0
