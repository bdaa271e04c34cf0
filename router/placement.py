"""The workers of an attempt: who may be chosen, by what is there and who refuses."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from engine.types import COLOCATED, Role
from router.cached_prefixes import CachedPrefixes
from router.errors import Overloaded, Unavailable
from router.fleet import Fleet, Rows
from router.policy import Ask, choose_colocated, choose_pair, choose_prefill
from router.siblings import Siblings
from router.worker import Worker


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of an attempt and what each does; the first prefills `uncached` tokens."""

    workers: tuple[tuple[Worker, Role], ...]
    uncached: int


def place(
    fleet: Fleet,
    prefixes: CachedPrefixes,
    tokens: Sequence[int],
    refusing: Collection[Worker],
    rng: random.Random,
    *,
    only_first: bool,
    reuses: bool = True,
    siblings: Siblings | None = None,
) -> Placement:
    """Choose among the workers that take new work and are not `refusing`.

    A decode worker that can prefill does both while there is no prefill worker, or if that is
    sooner. `only_first`: the first token is the last, so no decode worker is needed. `reuses`:
    what is cached need not be computed. `siblings`: of a prompt with several choices, of which
    this is the next.

    Raises:
        Unavailable: a role has no worker, or there is none at all.
        Overloaded: it has, and all of them refuse.
    """
    if not fleet.siblings:
        siblings = None
    if siblings is not None:
        followed = siblings.follow(fleet, refusing, only_first=only_first)
        if followed is not None:
            return Placement(followed, siblings.uncached(followed, len(tokens)))
    prefill, decode = fleet.taking(Role.PREFILL), fleet.taking(Role.DECODE)
    colocated = fleet.taking(COLOCATED)
    if not len(colocated) and not len(prefill):
        colocated = fleet.standing_in
    _check(colocated, prefill, decode, only_first=only_first)

    def willing(rows: Rows) -> Rows:
        away = [worker.row for worker in refusing if worker.row is not None]
        return rows[~np.isin(rows, away)] if away else rows

    cached = prefixes.tokens(tokens) if reuses else np.zeros(fleet.rows, np.int64)
    ask = Ask(len(tokens), cached)
    if siblings is not None:
        ask = siblings.ask(fleet, len(tokens), cached)
        prefill = siblings.those_having(fleet, willing(prefill))
    pair: tuple[int, int] | None
    if len(colocated):
        both = choose_colocated(fleet, willing(colocated), ask, rng)
        pair = None if both is None else (both, both)
    elif only_first:
        first = choose_prefill(fleet, willing(prefill), ask, rng)
        pair = None if first is None else (first, -1)
    else:
        local = willing(fleet.standing_in)
        pair = choose_pair(fleet, willing(prefill), willing(decode), local, ask, rng)
    if pair is None:
        raise Overloaded("every worker's queue is full")
    first, second = pair
    roles: tuple[Role, ...]
    if second < 0:
        places, roles = [(first, "prefill")], (Role.PREFILL,)
    elif first == second:
        places, roles = [(first, "colocated" if len(colocated) else "local")], (COLOCATED,)
    else:
        places, roles = [(first, "prefill"), (second, "decode")], (Role.PREFILL, Role.DECODE)
    for row, where in places:
        prefixes.count(where, len(tokens), int(cached[row]))
    workers = tuple(zip((fleet.worker(row) for row, _ in places), roles, strict=True))
    if siblings is not None:
        siblings.placed(fleet, workers, ask)
    return Placement(workers, len(tokens) - int(ask.cached[first]))


def _check(colocated: Rows, prefill: Rows, decode: Rows, *, only_first: bool) -> None:
    """Raise Unavailable where a role that is needed has no worker."""
    if len(colocated) or (len(prefill) and (only_first or len(decode))):
        return
    missing = "decode worker" if len(prefill) else "prefill worker" if len(decode) else "worker"
    raise Unavailable(f"no {missing} is ready")
