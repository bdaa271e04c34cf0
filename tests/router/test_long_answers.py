"""Answers with many log-probabilities are the same as short ones, and made in a thread."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import json_parts, whole_answer
from router.answers import Answer, encode_json
from router.json_parts import written
from tests.router.conftest import Client
from tests.router.fakes import ScriptedGenerator, batches

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=30,
)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
RESPONSE = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (
        "/v1/completions",
        {"prompt": ["abc", "d"], "n": 3, "echo": True, "logprobs": 2, "return_token_ids": True},
    ),
    "chats": (
        "/v1/chat/completions",
        {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    ),
    "responses": ("/v1/responses", RESPONSE),
    "a chat instance": (
        "/generate",
        {"instances": [{**CHAT, "@requestFormat": "chatCompletions", "logprobs": True}]},
    ),
}


@given(values, st.integers(1, 4))
def test_json_in_parts_is_the_json(value: Any, most: int) -> None:
    assert written(value, most) == encode_json(value)


def test_no_call_of_the_encoder_gets_more_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def encode(value: Any) -> str:
        lengths.append(len(value) if isinstance(value, list) else 0)
        return encode_json(value)

    monkeypatch.setattr(json_parts, "encode_json", encode)
    value = {"a": [{"b": {"c": list(range(100))}}]}
    assert json.loads(written(value, 32)) == value
    assert max(lengths) == 32


@pytest.mark.parametrize("kind", BODIES)
async def test_a_long_answer_is_what_a_short_one_is(
    client: Client, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    generator.script = batches("x" * 40)
    path, body = BODIES[kind]

    async def ask() -> Any:
        answer = await client.post(path, body)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        told = answer.json()
        told = told.get("predictions", told)
        return {name: told[name] for name in ("choices", "output", "usage") if name in told}

    def same(answer: Any) -> Any:
        for message in answer.get("output", ()):
            del message["id"]
        return answer

    short = same(await ask())
    monkeypatch.setattr(whole_answer, "INLINE_ENTRIES", 0)
    assert same(await ask()) == short


@pytest.mark.parametrize(
    ("body", "on_loop"),
    [
        ({"n": 2}, True),
        ({"n": 2, "logprobs": 0}, True),
        ({"n": 25, "logprobs": 0}, False),
        ({"n": 2, "prompt": "abcd", "echo": True, "logprobs": 0}, True),
        ({"n": 25, "max_tokens": 1, "prompt": "p" * 50, "echo": True, "logprobs": 0}, False),
        ({"n": 25, "max_tokens": 1, "prompt": "p" * 50, "return_token_ids": True}, False),
    ],
)
async def test_only_a_long_answer_is_made_in_a_thread(
    client: Client,
    generator: ScriptedGenerator,
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, Any],
    on_loop: bool,
) -> None:
    threads: list[int] = []
    whole = Answer.whole

    def noting(answer: Answer, *arguments: Any) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return whole(answer, *arguments)

    monkeypatch.setattr(Answer, "whole", noting)
    generator.script = batches("x" * 50)
    await client.complete(**body)
    assert (threads == [threading.get_ident()]) is on_loop
