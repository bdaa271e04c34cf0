"""Answers that begin with their prompt, with its log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from router.prompt_scores import _INLINE_TOKENS
from tests.router.conftest import Client
from tests.router.fakes import EOS, LIMITS, ScriptedGenerator, batches


def merged(events: list[Any]) -> dict[str, list[Any]]:
    """The log-probabilities of a stream's chunks, one after the other."""
    parts = [event["choices"][0]["logprobs"] for event in events[:-1]]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


async def test_logprobs_begin_with_those_of_the_prompt(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("xy", 1)
    answer = await client.complete(prompt="aéb", echo=True, logprobs=2)
    choice = answer["choices"][0]
    assert choice["text"] == "aébxy"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "b", "x", "y", "<|eos|>"]
    assert logprobs["token_logprobs"] == [None, -1, -2, -3, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"\ufffd": -1, "b": -3}
    assert logprobs["top_logprobs"][4] == {"x": -0.5, "y": -1.5}
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 5]
    assert generator.calls[0].sampling.prompt_logprobs == 2
    events = await client.stream_completion(prompt="aéb", echo=True, logprobs=2)
    assert merged(events) == logprobs
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "aébxy"


async def test_a_stream_tells_them_once_also_where_text_is_held_back(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("👍z", 1)
    asked: dict[str, Any] = {"prompt": "ab", "echo": True, "logprobs": 0, "n": 2}
    whole = await client.complete(**asked)
    scored = [call.sampling.prompt_logprobs for call in generator.calls]
    assert scored == [0, None], "the prompt is scored once for both"
    events = await client.stream_completion(**asked)
    for number, choice in enumerate(whole["choices"]):
        assert choice["logprobs"]["token_logprobs"][:2] == [None, -1]
        own = [e for e in events[:-1] if e["choices"][0]["index"] == number]
        assert merged([*own, None]) == choice["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_ask_for_the_prompt_alone(
    client: Client, generator: ScriptedGenerator, stream: bool
) -> None:
    generator.script = batches("xy", 1)
    asked: dict[str, Any] = {"prompt": [*b"ab"], "echo": True, "max_tokens": 0, "logprobs": 1}
    if stream:
        options = {"include_usage": True}
        first, last, _ = await client.stream_completion(**asked, stream_options=options)
        choice, usage = first["choices"][0], last["usage"]
    else:
        answer = await client.complete(**asked)
        choice, usage = answer["choices"][0], answer["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 0)
    assert generator.calls[0].sampling.max_tokens == 1  # what a worker computes at least
    assert generator.calls[0].closed.is_set()


async def test_without_logprobs_none_are_asked_for(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x")
    for asked in ({"echo": True}, {"logprobs": 1}, {"echo": True, "max_tokens": 0}):
        await client.complete(prompt="ab", **asked)
    assert [call.sampling.prompt_logprobs for call in generator.calls] == [None] * 3


async def test_a_prompt_of_one_token_has_none(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = [[EOS]]
    answer = await client.complete(prompt=[97], echo=True, logprobs=3, max_tokens=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "<|eos|>"]
    assert logprobs["token_logprobs"] == [None, -0.5]


async def test_long_prompts_are_told_as_short_ones(
    client: Client, generator: ScriptedGenerator
) -> None:
    count = _INLINE_TOKENS + 40
    generator.limits = type(LIMITS)("long", 512, count + 8, 16, 100, 8)
    generator.script = batches("x")
    prompt = [*b"ab"] * (count // 2)
    answer = await client.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][:count] == [None, *(-p for p in range(1, count))]
    assert logprobs["text_offset"][:count] == [*range(count)]
    assert "".join(logprobs["tokens"][:count]) == "ab" * (count // 2)
