"""Who is admitted first."""

from __future__ import annotations

import dataclasses

import pytest

from engine.events import Add, Admitted
from engine.sequence import Sequence
from engine.types import SequenceRequest
from engine.waiting import WaitingQueue
from tests.engine.helpers import make_engine, request, run


def asked(name: str, priority: int = 0, output: tuple[int, ...] = ()) -> SequenceRequest:
    return dataclasses.replace(
        request(name, (1, 2), output=output, max_tokens=4), priority=priority
    )


REQUESTS = [
    asked("late", 7), asked("first"), asked("second"), asked("begun", output=(3,)),
    asked("begun, late", 7, (3,)), asked("urgent", -7),
]  # fmt: skip
ORDER = ["urgent", "begun", "first", "second", "begun, late", "late"]


def test_by_priority_then_what_has_begun_then_in_order() -> None:
    queue = WaitingQueue()
    for each in REQUESTS:
        queue.append(Sequence.of(each))
    assert [sequence.id.attempt.request_id for sequence in queue] == ORDER
    queue.remove(list(queue)[2])
    names = [queue.popleft().id.attempt.request_id for _ in range(len(queue))]
    assert names == ORDER[:2] + ORDER[3:]
    assert not queue
    with pytest.raises(IndexError):
        queue.popleft()
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(Sequence.of(REQUESTS[0]))


def test_the_engine_admits_in_that_order() -> None:
    engine = make_engine(max_seqs=1, max_prefill_seqs=1)
    engine.submit(Add(asked("running", 9)))
    engine.step()
    for each in REQUESTS:
        engine.submit(Add(each))
    admitted = [e.id.attempt.request_id for e in run(engine) if isinstance(e, Admitted)]
    assert [name for name in admitted if name != "running"] == ORDER
