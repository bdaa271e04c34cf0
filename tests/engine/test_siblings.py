"""The choices of one prompt compute it once, with a prefix cache and without one."""

from __future__ import annotations

import dataclasses

import pytest

from engine.engine import Engine
from engine.events import (
    Abort,
    Add,
    Admitted,
    BeginDecode,
    CacheChanged,
    Event,
    KVWritten,
    WriteKV,
)
from engine.types import COLOCATED, AttemptId, Role, SequenceRequest, TokenDelta
from tests.engine.helpers import (
    deltas_of,
    expected,
    kv_of,
    make_engine,
    output_of,
    request,
    run,
    run_until,
)

PROMPT = tuple(range(1, 19))  # four blocks and a half
GROUP = b"g" * 16


@pytest.mark.parametrize("hit_tokens", [None, 8])
def test_siblings_compute_their_tails_alone(hit_tokens: int | None) -> None:
    engine = make_engine(32, 4, hit_tokens=hit_tokens)
    for name in "abcd":
        engine.submit(Add(request(name, PROMPT, group=GROUP, max_tokens=3)))
    events = run(engine)
    for name in "abcd":
        assert output_of(events, name) == expected(PROMPT, 3)
    assert [e.reused for e in events if isinstance(e, Admitted)] == [0, 16, 16, 16]
    told = any(isinstance(e, CacheChanged) for e in events)
    assert told == (hit_tokens is not None)
    cached = [deltas_of(events, name)[0].cached_tokens for name in "abcd"]
    assert cached == ([0] * 4 if hit_tokens is None else [0, 16, 16, 16])


def test_siblings_import_once() -> None:
    """The others wait for the first, and need only what follows its last whole block."""
    engine = make_engine(32, 4)
    for name in "abc":
        engine.submit(Add(imported(name)))
    assert admitted(run(engine)) == {"a": 0}
    events = write(engine, "a", 0)
    assert admitted(events) == {"b": 16, "c": 16}
    for name in "bc":
        events += write(engine, name, 16)
    for name in "abc":
        tokens = tuple(t for delta in deltas_of(events, name) for t in delta.tokens)
        assert tokens == expected(PROMPT, 3)[1:]
    assert engine.load().free_blocks + engine.load().cached_blocks == 32


@pytest.mark.parametrize("roles", [COLOCATED, Role.DECODE])
def test_when_the_first_is_gone_the_next_takes_its_place(roles: Role) -> None:
    engine = make_engine(32, 4, max_batch_tokens=13)  # of a prompt, 13 tokens a step
    for name in "abc":
        engine.submit(Add(dataclasses.replace(imported(name), roles=roles)))
    events = [*engine.step().events]
    assert admitted(events) == {"a": 0}
    engine.submit(Abort(AttemptId("a", 0)))
    events = run(engine)
    begun = admitted(events)
    assert next(iter(begun.items())) == ("b", 0)
    if roles is Role.DECODE:
        assert admitted(write(engine, "b", 0)) == {"c": 16}
    else:
        assert begun["c"] == 16
        assert output_of(events, "b") == output_of(events, "c") == expected(PROMPT, 3)


def test_whoever_needs_all_logits_computes_all() -> None:
    """And shares the blocks even so, once they are there."""
    engine = make_engine(32, 4)
    for name in "ab":
        engine.submit(Add(request(name, PROMPT, group=GROUP, max_tokens=9, prompt_logprobs=0)))
    events = run_until(engine, TokenDelta)
    events += engine.step().events
    assert engine.load().running_blocks == 4 + 2 * 2
    events += run(engine)
    assert admitted(events) == {"a": 0, "b": 0}
    assert output_of(events, "a") == output_of(events, "b") == expected(PROMPT, 9)


def imported(name: str) -> SequenceRequest:
    transfer = name.encode() * 16
    return request(name, PROMPT, Role.DECODE, transfer, group=GROUP, max_tokens=3)


def admitted(events: list[Event]) -> dict[str, int]:
    """Who was, in order, and how many tokens each found."""
    return {e.id.attempt.request_id: e.reused for e in events if isinstance(e, Admitted)}


def write(engine: Engine, name: str, start: int) -> list[Event]:
    """All KV from token `start` on, and the first token after it; returns what comes of it."""
    asked = imported(name)
    arrays = kv_of(PROMPT[start:])
    engine.submit(WriteKV(ord(name), asked.id, start, len(PROMPT), arrays))
    events = run(engine)
    assert KVWritten(ord(name), ok=True) in events
    engine.submit(BeginDecode(asked.id, expected(PROMPT, 1)[0]))
    return events + run(engine)
