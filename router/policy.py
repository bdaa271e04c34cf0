"""Which workers serve a request: the least loaded, ties at random."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from router.workers import Worker


def prefill_cost(worker: Worker) -> float:
    """Prompt tokens ahead of a new request.

    What this router has sent and what the worker last told overlap: the larger one counts.
    """
    return max(worker.load.waiting_tokens, worker.prefill_tokens)


def decode_cost(worker: Worker) -> float:
    """How full the batch and the pool will be, whichever is fuller; 1 is full."""
    limits = worker.info.limits
    load = worker.load
    sequences = max(load.running + load.waiting, worker.sequences) / limits.max_seqs
    blocks = 1.0 - (load.free_blocks + load.cached_blocks) / limits.num_blocks
    return max(sequences, blocks)


def choose_prefill(workers: Iterable[Worker], rng: random.Random) -> Worker | None:
    """The worker with the fewest prompt tokens ahead, then the fewest sequences.

    One that waits for its exports to be fetched comes last: its queue does not move.
    """
    costs = [((w.load.export_limited, prefill_cost(w), w.sequences), w) for w in workers]
    return _least(costs, rng)


def choose_decode(workers: Iterable[Worker], rng: random.Random) -> Worker | None:
    """The emptiest worker, then the one with the fewest sequences."""
    return _least([((decode_cost(w), w.sequences), w) for w in workers], rng)


def choose_colocated(workers: Iterable[Worker], rng: random.Random) -> Worker | None:
    """The emptiest worker, then the one with the fewest prompt tokens ahead."""
    return _least([((decode_cost(w), prefill_cost(w)), w) for w in workers], rng)


def _least(costs: Sequence[tuple[tuple[float, ...], Worker]], rng: random.Random) -> Worker | None:
    if not costs:
        return None
    least = min(cost for cost, _ in costs)
    return rng.choice([worker for cost, worker in costs if cost == least])
