"""Rates and shares, the time that is counted, and the bare application's bytes."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.bare_app import bare_app, split_events
from benchmarks.router_speed import RouterSpeed
from benchmarks.token_times import TokenTimes
from benchmarks.token_ways import WayError, streamed_events

MS = 1_000_000


def test_the_rate_is_that_of_all_streams_together() -> None:
    # The second stream begins at 20 ms, the first ends at 50 ms; six come between.
    arrived = np.array([[10, 20, 30, 40, 50], [20, 30, 40, 45, 60]]) * MS
    times = TokenTimes(np.zeros_like(arrived), arrived)
    assert times.rate == pytest.approx(6 / 0.030)
    late = np.array([[10, 20], [30, 40]]) * MS
    with pytest.raises(WayError, match="ended before the last has begun"):
        _ = TokenTimes(np.zeros_like(late), late).rate


def test_tokens_are_counted_that_were_sent_while_all_streams_were_under_way() -> None:
    sent = np.array([[0, 10, 20], [5, 15, 25]]) * MS
    arrived = sent + np.array([[9, 1, 2], [9, 3, 4]]) * MS
    assert TokenTimes(sent, arrived).on_the_way_together.tolist() == [2 * MS, 3 * MS, 4 * MS]


def test_targets_speak_about_median_rounds() -> None:
    speed = RouterSpeed([50.0, 60.0, 10.0], [100.0, 100.0, 100.0], [3.0, 19.0, 90.0])
    assert speed.share == 0.5
    assert speed.missed(0.5, 20) == []
    share, added = speed.missed(0.6, 19)
    assert "0.50 of a bare application's tokens/s, the target is 0.6" in share
    assert "adds 19.0 ms at the 99th percentile, the target is under 19 ms" in added


async def test_the_bare_application_sends_the_bytes_it_was_given() -> None:
    chunks = [b'data: {"a":1}\n\n', b"data: [DONE]\n\n"]
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks)
    events = split_events(streamed_events(answer))
    assert events == chunks
    transport: Any = httpx.ASGITransport(app=bare_app(events))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post("/any", json={"prompt": "p"})).content == b"".join(chunks)
    with pytest.raises(ValueError, match="amid an event"):
        split_events(b"data: x")
