"""Reading tokens and their arrivals out of a streamed HTTP answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.token_stamps import create_stamps, open_stamps, prompt_of, request_of, token_at
from benchmarks.token_ways import DirectWay, RoutedWay, Way, WayError, event_arrivals

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: str) -> bytes:
    body = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(body), body)


def event(*indices: int) -> bytes:
    ids = [token_at(index) for index in indices]
    return chunk(json.dumps({"choices": [{"token_ids": ids}]}))


END = chunk("[DONE]") + b"0\r\n\r\n"


def test_a_token_arrives_with_the_last_byte_of_its_event() -> None:
    split = event(1)
    reads = [
        (10, HEAD + event(0)),
        (20, split[:15]),
        (30, split[15:] + event(2, 3)),
        (40, event(4) + END),
    ]
    assert event_arrivals(reads, 5) == [10, 30, 30, 30, 40]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "the router answers ''"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nnot ready", "503 .*not ready"),
        (HEAD + event(0), "without \\[DONE\\]"),
        (HEAD + event(0) + END, "2 tokens were sent and 1 came"),
        (HEAD + event(0, 2) + END, "2 tokens were sent and 2 came"),
        (HEAD + event(0) + chunk('{"error": {"message": "lost"}}') + END, "an event is .*lost"),
    ],
)
def test_what_is_not_the_answer_is_an_error(answer: bytes, message: str) -> None:
    with pytest.raises(WayError, match=message):
        event_arrivals([(10, answer)], 2)


def test_requests_travel_as_prompts_of_byte_tokens() -> None:
    for request in (0, 1, 255, 256, 65535):
        prompt = prompt_of(request)
        assert request_of(prompt) == request
        assert all(0 <= token < 256 for token in prompt)


def test_stamps_are_seen_through_another_mapping(tmp_path: Path) -> None:
    seen = create_stamps(tmp_path / "stamps.npy", requests=2, tokens=3)
    written = open_stamps(tmp_path / "stamps.npy")
    written[1, 2] = 7
    assert seen.tolist() == [[0, 0, 0], [0, 0, 7]]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (DirectWay("unix:/no/such/worker.sock"), "the session with the worker"),
        (RoutedWay("http://127.0.0.1:1"), "no connection to the router"),
    ],
)
async def test_peers_that_are_not_there_are_told(way: Way, message: str) -> None:
    with pytest.raises(WayError, match=message):
        await way([0], 1)
