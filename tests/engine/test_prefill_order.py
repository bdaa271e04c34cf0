"""Prompts that take turns: short ones do not wait, long ones end, answers do not change."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.engine import Engine
from engine.events import Add, Computed, Event, Prefilled
from engine.limits import Limits
from engine.prefill_order import AGEING, PrefillQueue, Share
from engine.sequence import Sequence
from engine.types import Role
from tests.engine.helpers import (
    LIMITS,
    Ahead,
    OneByOne,
    deltas_of,
    expected,
    make_engine,
    output_of,
    request,
    run,
)

LONGEST = 200


def queue_of(
    *lengths: int, rows: int = 1, budget: int = 16, interleave: bool = True
) -> PrefillQueue:
    bounds = {"max_prefill_seqs": rows, "max_batch_tokens": budget, "max_model_len": 1000}
    queue = PrefillQueue(Limits(**{**LIMITS, **bounds, "interleave_prefills": interleave}))
    for number, length in enumerate(lengths):
        queue.append(sequence_of(str(number), length))
    return queue


def sequence_of(name: str, length: int, priority: int = 0) -> Sequence:
    asked = request(name, (1,) * length, Role.PREFILL, name.encode())
    return Sequence.of(dataclasses.replace(asked, priority=priority))


def step(queue: PrefillQueue, budget: int = 16) -> list[tuple[str, int]]:
    """Compute what the queue says, and take out what is done."""
    shares: list[Share] = queue.shares(budget)
    for sequence, tokens in shares:
        sequence.scheduled += tokens
        if sequence.scheduled == len(sequence.tokens):
            queue.remove(sequence)
    return [(s.id.attempt.request_id, tokens) for s, tokens in shares]


def test_in_order_the_first_is_computed_to_its_end() -> None:
    queue = queue_of(40, 3, interleave=False, rows=2)
    assert [step(queue) for _ in range(3)] == [[("0", 16)], [("0", 16)], [("0", 8), ("1", 3)]]


def test_the_one_with_the_least_left_goes_first_and_rows_and_tokens_are_bounded() -> None:
    queue = queue_of(40, 3, 5, 4, rows=2)
    assert step(queue) == [("1", 3), ("3", 4)]
    assert step(queue) == [("2", 5), ("0", 11)]
    assert step(queue) == [("0", 16)]


def test_a_better_priority_goes_before_a_shorter_prompt() -> None:
    queue = queue_of(3)
    queue.append(sequence_of("urgent", 20, priority=-1))
    assert [step(queue) for _ in range(3)] == [[("urgent", 16)], [("urgent", 4)], [("0", 3)]]


@settings(deadline=None)
@given(
    rows=st.integers(1, 3),
    budget=st.integers(1, 32),
    slots=st.integers(1, 4),
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=60),
)
def test_every_prompt_ends_within_bounds(
    rows: int, budget: int, slots: int, lengths: list[int]
) -> None:
    """Whatever comes as soon as there is a slot, above all a stream of short prompts."""
    queue = queue_of(rows=rows, budget=budget)
    ageing = max(1, budget // AGEING)
    begun: dict[str, int] = {}
    unborn = dict(enumerate(lengths))
    now = 0
    while unborn or queue:
        for number in list(unborn)[: slots - len(queue)]:
            queue.append(sequence_of(str(number), unborn.pop(number)))
            begun[str(number)] = now
        now += 1
        taken = step(queue, budget)
        assert 1 <= len(taken) <= rows
        assert sum(tokens for _, tokens in taken) <= budget
        running = {s.id.attempt.request_id for s in queue}
        for name in begun.keys() - running:
            length, others = lengths[int(name)], (slots - 1) * -(-LONGEST // budget)
            most = -(-length // ageing) + others + -(-length // budget)
            assert now - begun.pop(name) <= most


def prefilled_after(engine: Engine, name: str) -> int:
    """Steps until the first token of `name`; every second one dispatches a forward pass."""
    for count in range(1, 100):
        events = engine.step().events
        if any(isinstance(e, Prefilled) and e.transfer_id == name.encode() for e in events):
            return count
    raise AssertionError("it starves")


@pytest.mark.parametrize("interleave", [True, False])
def test_a_short_prompt_behind_a_long_one_starts_at_once(interleave: bool) -> None:
    engine = make_engine(
        max_prefill_seqs=1, max_batch_tokens=5, interleave_prefills=interleave, pace=OneByOne()
    )
    engine.submit(Add(request("long", tuple(range(30)), Role.PREFILL, b"long")))
    engine.step()
    engine.submit(Add(request("short", (1, 2), Role.PREFILL, b"short")))
    steps = prefilled_after(engine, "short")
    if interleave:
        assert steps <= 3
        assert prefilled_after(engine, "long") <= 2 * 30 / 5
    else:
        assert steps > 2 * 30 / 5


@pytest.mark.parametrize("pace", [Ahead, OneByOne])
def test_decoding_rides_in_every_step_of_a_chunked_prompt(pace: type[Ahead]) -> None:
    """So a running sequence waits for a chunk's time at most."""
    engine = make_engine(max_batch_tokens=4 + 4, interleave_prefills=True, pace=pace())
    engine.submit(Add(request("running", (1, 2, 3), max_tokens=20)))
    while not deltas_of(list(engine.step().events), "running"):
        pass
    engine.submit(Add(request("long", tuple(range(30)), max_tokens=2)))
    steps: list[tuple[Event, ...]] = []
    while not any(deltas_of(list(events), "long") for events in steps):
        steps.append(engine.step().events)
    quiet = [events for events in steps if not deltas_of(list(events), "running")]
    assert len(steps) > 30 // 8
    assert len(quiet) <= (1 if pace is Ahead else len(steps) // 2)


def test_answers_are_those_of_prompts_computed_whole() -> None:
    prompts = {f"r{i}": tuple((7 * i + j) % 90 for j in range(1 + 5 * i)) for i in range(7)}
    engine = make_engine(
        num_blocks=64, max_seqs=6, max_batch_tokens=9, interleave_prefills=True, max_prefill_seqs=3
    )
    for name, prompt in prompts.items():
        engine.submit(Add(request(name, prompt, max_tokens=4)))
    events = run(engine)
    for name, prompt in prompts.items():
        assert output_of(events, name) == expected(prompt, 4)


def test_what_has_been_computed_is_told_for_each_prompt() -> None:
    engine = make_engine(max_prefill_seqs=2, max_batch_tokens=10, interleave_prefills=True)
    engine.submit(Add(request("long", tuple(range(25)), Role.PREFILL, b"long")))
    engine.submit(Add(request("short", (1, 2, 3), Role.PREFILL, b"short")))
    told = [e for e in run(engine) if isinstance(e, Computed)]
    assert [e.tokens for e in told if e.transfer_id == b"short"] == [3]
    counts = [e.tokens for e in told if e.transfer_id == b"long"]
    assert counts == sorted(counts)
    assert counts[-1] == 25
