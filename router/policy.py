"""Which workers serve a request: what each would cost it, in seconds, ties at random.

    TTFT    (tokens queued + tokens of the prompt that are not cached there) / prefill rate
    fetch   tokens not cached on the decode worker / FETCH_RATE
    decode  DECODE_S times how full its batch and its pool will be, whichever is fuller:
            each token takes longer the more sequences share a step, and a full pool is a wait

A prefill worker costs TTFT, a decode worker fetch + decode, a colocated one TTFT + decode. What
is remote, prefill on one and decode on another, costs HANDOFF_S on top. What is local, on a decode
worker that can prefill, delays those that decode there: its uncached tokens count for each.

Each is one line over arrays [workers] below. A prefill worker that waits for its exports to be
fetched comes last, as does a decode worker without room: their queues do not move.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from router.fleet import Fleet, Rows

Seconds = npt.NDArray[np.float64]

FETCH_RATE = 50_000.0
"""Tokens/s of KV from one worker to another; much of it overlaps with other work."""
DECODE_S = 4.0
"""What a request loses in a full batch against an empty one: about 128 tokens of 30 ms more."""
HANDOFF_S = 0.005
"""From the first token on the prefill worker to the first step on the decode worker."""
LOCAL_MOST_TOKENS = 256
"""So many uncached tokens, and no more, a decode worker prefills while it decodes."""
TIE = 1.05
"""Estimates that differ by less are taken as equal."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt: its tokens, and how many of them each worker has cached [rows of the fleet]."""

    tokens: int
    cached: npt.NDArray[np.int64]


class _Costs:
    """Of each worker in `rows`, for a prompt; all are [len(rows)]."""

    def __init__(self, fleet: Fleet, rows: Rows, ask: Ask) -> None:
        table: Any = fleet.table[rows]
        uncached = ask.tokens - ask.cached[rows]
        queued = np.maximum(table["waiting_tokens"], table["sent_tokens"])
        blocks = (ask.tokens + table["block_size"]) // table["block_size"]  # one token more
        batch = (np.maximum(table["taken"], table["sequences"]) + 1) / table["max_seqs"]
        pool = 1.0 - (table["room"] - blocks) / table["num_blocks"]
        self.sequences = table["sequences"]
        self.ttft: Seconds = (queued + uncached) / table["prefill_rate"]
        self.fetch: Seconds = uncached / FETCH_RATE
        self.decode: Seconds = DECODE_S * np.maximum(batch, pool)
        self.disturbed: Seconds = table["running"] * uncached / table["prefill_rate"]
        self.many: npt.NDArray[np.bool_] = uncached > LOCAL_MOST_TOKENS
        self.stuck: npt.NDArray[np.bool_] = table["export_limited"]
        self.full: npt.NDArray[np.bool_] = table["room"] < blocks


def choose_prefill(fleet: Fleet, rows: Rows, ask: Ask, rng: random.Random) -> int | None:
    """The row, among `rows`, of the worker that has the first token first; None without any."""
    costs = _Costs(fleet, rows, ask)
    at = _least(costs.ttft, costs.stuck, costs.sequences, rng)
    return None if at is None else int(rows[at])


def choose_colocated(fleet: Fleet, rows: Rows, ask: Ask, rng: random.Random) -> int | None:
    """The row, among `rows`, of the worker that does it all soonest; None without any."""
    costs = _Costs(fleet, rows, ask)
    at = _least(costs.ttft + costs.decode, costs.full, costs.sequences, rng)
    return None if at is None else int(rows[at])


def choose_pair(
    fleet: Fleet, prefill: Rows, decode: Rows, local: Rows, ask: Ask, rng: random.Random
) -> tuple[int, int] | None:
    """The rows of a prefill and a decode worker; twice the same where the latter does both.

    Args:
        prefill, decode: rows to choose from; None without one of each.
        local: those of `decode` that can prefill.
    """
    ahead, after = _Costs(fleet, prefill, ask), _Costs(fleet, decode, ask)
    first = _least(ahead.ttft, ahead.stuck, ahead.sequences, rng)
    second = _least(after.fetch + after.decode, after.full, after.sequences, rng)
    if first is None or second is None:
        return None
    remote_s = ahead.ttft[first] + HANDOFF_S + after.fetch[second] + after.decode[second]
    alone = _Costs(fleet, local, ask)
    local_s = alone.ttft + alone.disturbed + alone.decode
    able = np.flatnonzero(~(alone.many | alone.full) & (local_s < remote_s))
    best = _least(local_s[able], alone.full[able], alone.sequences[able], rng)
    if best is not None:
        row = int(local[able[best]])
        return row, row
    return int(prefill[first]), int(decode[second])


def _least(
    seconds: Seconds,
    last: npt.NDArray[np.bool_],
    sequences: npt.NDArray[np.float64],
    rng: random.Random,
) -> int | None:
    """Where `seconds` is least, then `sequences`; `last` only if there are no others."""
    if not len(seconds):
        return None
    if last.any() and not last.all():
        seconds = np.where(last, np.inf, seconds)
    near = np.flatnonzero(seconds <= TIE * seconds.min())
    fewest = sequences[near]
    near = near[fewest == fewest.min()]
    return int(near[rng.randrange(len(near))])
