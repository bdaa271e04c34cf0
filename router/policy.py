"""Which workers serve a request: what each would cost it, in seconds, ties at random.

    TTFT    (tokens queued + tokens of the prompt that are not cached there) / prefill rate
    fetch   tokens not cached on the decode worker / FETCH_RATE
    decode  DECODE_S times how full its batch and its pool will be, whichever is fuller:
            each token takes longer the more sequences share a step, and a full pool is a wait

A prefill worker costs TTFT, a decode worker fetch + decode, a colocated one TTFT + decode. What
is remote, prefill on one and decode on another, costs HANDOFF_S on top. What is local, on a decode
worker that can prefill, delays those that decode there: its uncached tokens count for each.

Each is one line over arrays [rows of the fleet] below, for all workers at once: that is sooner
done than to gather those of a role first. A prefill worker that waits for its exports to be
fetched comes last, as does a decode worker without room: their queues do not move.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

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
    """A prompt, or one with output so far.

    Attributes:
        tokens: how many it has.
        cached: how many of them each worker has cached [rows of the fleet].
        choices: sequences that are to go the same way; their first `shared` tokens are the same.
    """

    tokens: int
    cached: npt.NDArray[np.int64]
    choices: int = 1
    shared: int = 0


class _Costs:
    """Of every row of the fleet, for a prompt; meaningless where the row is nobody's."""

    def __init__(self, fleet: Fleet, ask: Ask) -> None:
        table = fleet.table
        uncached = ask.tokens - ask.cached[: fleet.rows]
        queued = np.maximum(table["waiting_tokens"], table["sent_tokens"])
        # One token more than the prompt; `//` takes ten times as long on floats.
        blocks = needed = np.floor(ask.tokens / table["block_size"]) + 1.0
        if ask.choices > 1:
            own = blocks - np.floor(ask.shared / table["block_size"])
            needed = blocks + (ask.choices - 1) * own
        batch = (np.maximum(table["taken"], table["sequences"]) + ask.choices) / table["max_seqs"]
        pool = 1.0 + (needed - table["room"]) / table["num_blocks"]
        self.sequences: npt.NDArray[np.float64] = table["sequences"]
        self.ttft: Seconds = (queued + uncached) / table["prefill_rate"]
        self.fetch: Seconds = uncached / FETCH_RATE
        self.decode: Seconds = DECODE_S * np.maximum(batch, pool)
        self.uncached: npt.NDArray[np.int64] = uncached
        self.stuck: npt.NDArray[np.bool_] = table["export_limited"]
        self.full: npt.NDArray[np.bool_] = table["room"] < blocks


def seats(fleet: Fleet, row: int, ask: Ask) -> int:
    """How many of the choices the worker of a row can decode at once beside what it has."""
    table = fleet.table
    slots = table["max_seqs"][row] - max(table["taken"][row], table["sequences"][row])
    size = int(table["block_size"][row])
    first = (ask.tokens + size) // size
    more = (table["room"][row] - first) // (first - ask.shared // size)
    return int(min(slots, 1 + more))


def choose_prefill(fleet: Fleet, rows: Rows, ask: Ask, rng: random.Random) -> int | None:
    """The row, among `rows`, of the worker that has the first token first; None without any."""
    costs = _Costs(fleet, ask)
    return _least(rows, costs.ttft, costs.stuck, costs.sequences, rng)


def choose_colocated(fleet: Fleet, rows: Rows, ask: Ask, rng: random.Random) -> int | None:
    """The row, among `rows`, of the worker that does it all soonest; None without any."""
    costs = _Costs(fleet, ask)
    return _least(rows, costs.ttft + costs.decode, costs.full, costs.sequences, rng)


def choose_pair(
    fleet: Fleet, prefill: Rows, decode: Rows, local: Rows, ask: Ask, rng: random.Random
) -> tuple[int, int] | None:
    """The rows of a prefill and a decode worker; twice the same where the latter does both.

    Args:
        prefill, decode: rows to choose from; None without one of each.
        local: those of `decode` that can prefill.
    """
    costs = _Costs(fleet, ask)
    first = _least(prefill, costs.ttft, costs.stuck, costs.sequences, rng)
    second = _least(decode, costs.fetch + costs.decode, costs.full, costs.sequences, rng)
    if first is None or second is None:
        return None
    few = local[costs.uncached[local] <= LOCAL_MOST_TOKENS]
    if len(few):
        remote_s = costs.ttft[first] + HANDOFF_S + costs.fetch[second] + costs.decode[second]
        disturbed = fleet.table["running"] * costs.uncached / fleet.table["prefill_rate"]
        local_s = costs.ttft + disturbed + costs.decode
        sooner = few[(local_s[few] < remote_s) & ~costs.full[few]]
        best = _least(sooner, local_s, costs.full, costs.sequences, rng)
        if best is not None:
            return best, best
    return first, second


def _least(
    rows: Rows,
    seconds: Seconds,
    last: npt.NDArray[np.bool_],
    sequences: npt.NDArray[np.float64],
    rng: random.Random,
) -> int | None:
    """The one of `rows` where `seconds` is least, then `sequences`.

    Those with `last` only if there are no others. None: there are no rows.
    """
    if not len(rows):
        return None
    its, late = seconds[rows], last[rows]
    if late.any() and not late.all():
        its[late] = np.inf
    near = rows[its <= TIE * its.min()]
    if len(near) == 1:
        return int(near[0])
    fewest = sequences[near]
    near = near[fewest == fewest.min()]
    return int(near[rng.randrange(len(near))])
