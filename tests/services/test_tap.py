"""Deltas that are taken as soon as they come, by whoever waits for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.types import Failure, FailureCode, FinishReason, SamplingParams, TokenDelta
from router.errors import BadRequest
from tests.services.deployment import eventually
from tests.services.scene import Scene, attempt, delta


@dataclass
class Taken:
    """A tap that notes what it is asked; it takes a delta unless `full`."""

    notes: list[object] = field(default_factory=list)
    full: bool = False

    def take(self, delta: TokenDelta) -> bool:
        if not self.full:
            self.notes.append(delta.tokens)
        return not self.full

    def write(self) -> None:
        self.notes.append("written")


async def begun() -> tuple[Scene, Taken]:
    """A request whose first two tokens, 5 and 6, have come."""
    scene, tap = Scene(), Taken()
    sampling = SamplingParams(max_tokens=20, seed=99)
    scene.stream = scene.dispatcher.generate((1, 2), sampling, request_id="r", tap=tap)
    asking = await scene.ask()
    scene.tell(scene.prefill, delta(0, 0, 5))
    assert (await asking).tokens == (5,)
    asking = await scene.ask()
    scene.tell(scene.decode, delta(0, 1, 6))
    assert (await asking).tokens == (6,)
    return scene, tap


async def test_what_is_taken_is_not_yielded() -> None:
    scene, tap = await begun()
    asking = await scene.ask()
    scene.tell(scene.decode, delta(0, 2, 7))
    scene.tell(scene.decode, delta(0, 3, 8, 9))
    assert tap.notes == [(7,), "written", (8, 9), "written"]
    tap.full = True
    scene.tell(scene.decode, delta(0, 5, 10))
    assert (await asking).index == 5
    await scene.stream.aclose()
    assert scene.whole()


async def test_nothing_is_offered_before_its_time() -> None:
    scene, tap = await begun()
    scene.tell(scene.decode, delta(0, 2, 7))  # nobody waits
    asking = await scene.ask()
    assert (await asking).tokens == (7,)
    asking = await scene.ask()
    scene.tell(scene.decode, delta(0, 4, 9))  # ahead
    scene.tell(scene.decode, delta(0, 3, 8))
    assert (await asking).tokens == (8,)
    assert (await anext(scene.stream)).tokens == (9,)
    assert tap.notes == []
    await scene.stream.aclose()


async def test_repeated_deltas_are_dropped_after_tapped_ones() -> None:
    scene, tap = await begun()
    asking = await scene.ask()
    scene.tell(scene.decode, delta(0, 2, 7))
    scene.tell(scene.decode, delta(0, 2, 7))
    scene.tell(scene.decode, delta(0, 3, 8))
    assert tap.notes == [(7,), "written", (8,), "written"]
    assert not asking.done()
    tap.full = True
    scene.tell(scene.decode, delta(0, 4, 9, finish=FinishReason.LENGTH))
    assert (await asking).tokens == (9,)


async def test_writes_come_after_all_of_a_step() -> None:
    scene, tap = await begun()
    asking = await scene.ask()
    scene.tell(scene.decode, delta(0, 2, 7), delta(0, 3, 8))
    assert tap.notes == [(7,), (8,), "written", "written"]
    scene.tell(scene.decode, Failure(attempt(), FailureCode.INVALID, "no"))
    with pytest.raises(BadRequest):
        await asking


async def test_another_attempt_goes_on_after_what_was_taken() -> None:
    scene, _ = await begun()
    asking = await scene.ask()
    scene.tell(scene.decode, delta(0, 2, 7))
    scene.tell(scene.decode, Failure(attempt(), FailureCode.INTERNAL, "why"))
    await eventually(lambda: len(scene.decode.orders) == 2)
    ((sequence,),) = (order.sequences for order in scene.decode.orders[1:])
    assert sequence.output == (5, 6, 7)
    scene.tell(scene.prefill, delta(1, 3, 8))
    assert (await asking).tokens == (8,)
    await scene.stream.aclose()


@pytest.mark.parametrize("where", ["take", "write"])
async def test_an_error_of_a_tap_is_that_of_its_request(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, tap = await begun()
    asking = await scene.ask()

    def fails(*_: TokenDelta) -> bool:
        raise ValueError("no such text")

    monkeypatch.setattr(tap, where, fails)
    scene.tell(scene.decode, delta(0, 2, 7))
    with pytest.raises(ValueError, match="no such text"):
        await asking
    assert scene.whole()
    assert scene.decode.aborted == [attempt()]
