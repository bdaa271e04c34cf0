"""What a first token tells of the time since its prompt left the queue."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from engine.events import Add
from engine.types import Role, SequenceRequest
from tests.engine.helpers import deltas_of, hand_over, make_engine, request, run

PROMPT = (1, 2, 3, 4, 5)


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second whenever it is read."""
    seconds = map(float, itertools.count(1))
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    for module in ("scheduler", "batch_rows"):
        monkeypatch.setattr(f"engine.{module}.time", clock)


@pytest.mark.parametrize("output", [(), (7, 8)])
def test_the_first_token_of_an_attempt_tells_it(output: tuple[int, ...]) -> None:
    engine = make_engine()
    engine.submit(Add(request("a", PROMPT, output=output, max_tokens=len(output) + 3)))
    assert [delta.prefill_s for delta in deltas_of(run(engine), "a")] == [1, 0, 0]


def test_who_waits_in_the_queue_is_not_admitted() -> None:
    engine = make_engine(num_blocks=2)  # room for one
    for name in ("a", "b"):
        engine.submit(Add(request(name, PROMPT, max_tokens=2)))
    events = run(engine)
    assert [delta.prefill_s for delta in deltas_of(events, "b")] == [1, 0]


def test_a_decode_worker_has_not_prefilled() -> None:
    def of(roles: Role) -> SequenceRequest:
        return request("a", PROMPT, roles, b"t" * 16, max_tokens=3)

    first, *others = hand_over(make_engine(), make_engine(), of, 2)
    assert first.prefill_s == 1
    assert [delta.prefill_s for delta in others] == [0, 0]
