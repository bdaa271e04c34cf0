"""The choices of one prompt compute it once, with a prefix cache and without one."""

from __future__ import annotations

import pytest

from engine.events import Add, Admitted, CacheChanged
from tests.engine.helpers import deltas_of, expected, make_engine, output_of, request, run

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
