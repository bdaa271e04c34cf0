"""How fast prompts are computed on a worker: as seen, as it was before, or as on the others."""

from __future__ import annotations

import pytest

from engine.types import AttemptId, Role, SequenceId, TokenDelta
from protos.codec import NO_ROLES, WorkerInfo
from router.fleet import DEFAULT_PREFILL_RATE, Fleet
from router.flight import Flight
from router.in_flight import FORGOTTEN_S, InFlight
from tests.services.deployment import deployment, eventually
from tests.services.scene import LIMITS, FakeWorker

ID = SequenceId(AttemptId("a", 0), 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def prefilled(
    worker: InFlight, clock: Clock, seconds: float, *, tokens: int, uncached: int, found: int
) -> None:
    """A prompt begins, and its first token comes after some time."""
    flight = Flight((worker,), 0, tokens, uncached)
    clock.now += seconds
    flight.deliver(TokenDelta(ID, 0, (1,), None, None, cached_tokens=found))
    flight.land()


@pytest.mark.parametrize(
    ("uncached", "found", "rate"),
    [
        (4000, 0, 2000.0),
        (4000, 2000, 1000.0),  # somebody else computed half of it meanwhile
        (4000, 4000 - 255, None),  # too little to tell
        (1500, 2400, 800.0),  # found in larger steps than it is known in
        (10, 0, None),  # it shared with its siblings, which is no hit
    ],
)
async def test_what_was_computed_is_rated(uncached: int, found: int, rate: float | None) -> None:
    clock = Clock()
    worker = InFlight(clock)
    prefilled(worker, clock, 2.0, tokens=4000, uncached=uncached, found=found)
    assert worker.rate.value == rate
    assert worker.prefill_tokens == 0


async def test_a_slow_prefill_is_forgotten() -> None:
    """So that a worker that was stalled once is tried again."""
    clock = Clock()
    worker = InFlight(clock)
    prefilled(worker, clock, 10.0, tokens=1000, uncached=1000, found=0)
    assert worker.rate.value == 100.0
    clock.now += FORGOTTEN_S
    assert worker.rate.value is None
    prefilled(worker, clock, 1.0, tokens=1000, uncached=1000, found=0)
    assert worker.rate.value is not None


async def test_a_later_token_that_comes_first_tells_nothing() -> None:
    worker = InFlight()
    flight = Flight((worker, InFlight()), 0, 4000, 4000)
    flight.deliver(TokenDelta(ID, 1, (1,), None, None))
    assert worker.rate.value is None
    assert worker.prefill_tokens == 0


def test_a_worker_that_was_never_seen_is_supposed_to_be_as_fast_as_the_others() -> None:
    fleet = Fleet()
    info = WorkerInfo(1, Role.PREFILL, LIMITS, (), NO_ROLES)
    one, two = (fleet.join(FakeWorker(name, Role.PREFILL), info) for name in "ab")  # type: ignore[arg-type]
    rates = fleet.table["prefill_rate"]
    assert rates[[one, two]].tolist() == [DEFAULT_PREFILL_RATE] * 2
    fleet.counted(one, 0, 1, 300.0)
    assert rates[[one, two]].tolist() == [300.0, 300.0]
    three = fleet.join(FakeWorker("c", Role.DECODE), info)  # type: ignore[arg-type]
    fleet.counted(two, 0, 1, 500.0)
    assert rates[[one, two, three]].tolist() == [300.0, 500.0, 400.0]
    fleet.counted(one, 0, 1, None)  # forgotten
    assert rates[[one, two, three]].tolist() == [500.0, 500.0, 500.0]
    fleet.leave(one)
    fleet.counted(two, 0, 2, 600.0)
    assert rates[[two, three]].tolist() == [600.0, 600.0]


async def test_a_worker_that_comes_back_is_known() -> None:
    async with deployment("1,1") as served:
        fleet = served.pool.fleet
        (row,) = fleet.taking(Role.PREFILL)
        fleet.worker(row).rate.add(3000, 10.0)
        await served["prefill-0"].kill()
        await eventually(lambda: not len(fleet.taking(Role.PREFILL)))
        await served.revive("prefill-0")
        await eventually(lambda: len(fleet.taking(Role.PREFILL)) == 1)
        (row,) = fleet.taking(Role.PREFILL)
        assert fleet.table["prefill_rate"][row] == 300.0
