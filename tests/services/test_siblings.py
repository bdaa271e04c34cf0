"""Where the choices of one prompt are sent: the same way, as long as there is room."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest

from engine.types import COLOCATED, Load, Role, SamplingParams
from protos.codec import GROUP_BYTES
from router.placement import Placement, place
from router.siblings import Siblings
from router.worker import Worker
from tests.services.scene import FakePool, FakeWorker, Scene, delta

PROMPT = tuple(range(9))  # two blocks are shared, and one is each choice's own


class Placing:
    """Choices of PROMPT that are placed one after the other, each counted where it goes."""

    def __init__(self, count: int, *workers: FakeWorker) -> None:
        self.pool = FakePool(*workers)
        self.siblings = Siblings(PROMPT, count)
        self.rng = random.Random(5)

    def next(
        self,
        refusing: Collection[FakeWorker] = (),
        tokens: tuple[int, ...] = PROMPT,
        *,
        only_first: bool = False,
    ) -> tuple[list[str], int]:
        """The names of its workers, and how many tokens it has to compute."""
        fleet, prefixes = self.pool.fleet, self.pool.prefixes
        away: set[Worker] = set(refusing)  # type: ignore[arg-type]
        placed: Placement = place(
            fleet, prefixes, tokens, away, self.rng, only_first=only_first, siblings=self.siblings
        )
        workers = [worker for worker, _ in placed.workers]
        workers[0].prefill_began(placed.uncached)
        for worker in workers:
            worker.began()
        return [worker.address for worker in workers], placed.uncached


def workers(roles: Role, *names: str, **fields: object) -> list[FakeWorker]:
    return [FakeWorker(name, roles, **fields) for name in names]  # type: ignore[arg-type]


def pairs() -> list[FakeWorker]:
    return workers(Role.PREFILL, "p1", "p2") + workers(Role.DECODE, "d1", "d2")


def test_all_follow_the_first_and_compute_their_own_tokens() -> None:
    placing = Placing(8, *pairs())
    first, uncached = placing.next()
    assert uncached == 9
    assert [placing.next() for _ in range(7)] == [(first, 1)] * 7
    others = Placing(8, *placing.pool.workers)
    assert not set(others.next()[0]) & set(first), "another prompt goes elsewhere"


def test_they_go_each_their_way_where_nothing_is_shared() -> None:
    """Windowed layers give back what others would begin with."""
    prefill, decode = workers(Role.PREFILL, "p1", "p2"), workers(Role.DECODE, "d", siblings=False)
    placing = Placing(8, *prefill, *decode)
    placed = [placing.next() for _ in range(8)]
    assert Counter(names[0] for names, _ in placed) == {"p1": 4, "p2": 4}
    assert {uncached for _, uncached in placed} == {len(PROMPT)}


def test_what_finds_no_slot_goes_to_the_next_worker_by_the_same_prefill_worker() -> None:
    """Workers have 8 slots."""
    placing = Placing(13, *pairs())
    placed = [placing.next() for _ in range(13)]
    assert len({names[0] for names, _ in placed}) == 1
    assert [uncached for _, uncached in placed] == [9] + [1] * 12
    decode = [names[1] for names, _ in placed]
    assert decode == [decode[0]] * 8 + [decode[-1]] * 5
    assert decode[0] != decode[-1]


def test_what_finds_no_blocks_goes_to_the_next_worker() -> None:
    """Five blocks hold the two that are shared and one for each of three."""
    decoding = workers(Role.DECODE, "d1", "d2", load=Load(free_blocks=5))
    placing = Placing(6, *workers(Role.PREFILL, "p"), *decoding)
    assert Counter(placing.next()[0][1] for _ in range(6)) == {"d1": 3, "d2": 3}


def test_more_than_all_workers_hold_wait_there() -> None:
    placing = Placing(20, *workers(COLOCATED, "w1", "w2"))
    assert Counter(placing.next()[0][0] for _ in range(20)) == {"w1": 10, "w2": 10}


@pytest.mark.parametrize("how", ["refusing", "gone"])
def test_where_a_worker_is_lost_all_go_to_another_together(how: str) -> None:
    placing = Placing(4, *pairs())
    (prefill, decode), _ = placing.next()
    by_name = {worker.name: worker for worker in placing.pool.workers}
    refusing = {by_name[decode]} if how == "refusing" else set()
    if how == "gone":
        placing.pool.change(*(by_name[name] for name in by_name if name != decode))
    resumed = (*PROMPT, 1, 2)
    placed = [placing.next(refusing, resumed) for _ in range(4)]
    assert {tuple(names) for names, _ in placed} == {(prefill, "d1" if decode == "d2" else "d2")}
    assert [uncached for _, uncached in placed] == [3] * 4, "the prompt is with its prefill worker"


def test_where_the_prefill_worker_is_lost_one_computes_all_again() -> None:
    placing = Placing(4, *pairs())
    (prefill, _), _ = placing.next()
    placing.pool.change(*(w for w in placing.pool.workers if w.name != prefill))
    placed = [placing.next() for _ in range(4)]
    assert [uncached for _, uncached in placed] == [9, 1, 1, 1]
    assert len({tuple(names) for names, _ in placed}) == 1


def test_first_tokens_alone_need_no_decode_worker() -> None:
    placing = Placing(3, *pairs())
    first = [placing.next(only_first=True) for _ in range(2)]
    assert [len(names) for names, _ in first] == [1, 1]
    names, uncached = placing.next()
    assert (names[0], len(names), uncached) == (first[0][0][0], 2, 1)


@pytest.mark.parametrize("several", [True, False])
async def test_workers_are_told_the_group(several: bool) -> None:
    scene = Scene()
    siblings = Siblings((1, 2), 2) if several else None
    scene.stream = scene.dispatcher.generate(
        (1, 2), SamplingParams(max_tokens=2), request_id="r", siblings=siblings
    )
    asking = await scene.ask()
    groups = [order.sequences[0].group for w in scene.pool.workers for order in w.orders]
    assert groups == ([siblings.group] * 2 if siblings else [b""] * 2)
    assert not siblings or len(siblings.group) == GROUP_BYTES
    scene.tell(scene.prefill, delta(0, 0, 5))
    assert (await asking).tokens == (5,)
    await scene.stream.aclose()
    assert scene.whole()
