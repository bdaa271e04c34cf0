from __future__ import annotations

import pytest

from tests.router.conftest import Client
from tests.router.fakes import EOS, MAX_MODEL_LEN, ScriptedGenerator, batches


def joined(events: list) -> str:
    assert events[-1] == "[DONE]"
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1] if e["choices"])


async def test_a_chat_has_what_strict_clients_require(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("Hello")
    answer = await client.chat()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["completion_tokens"] == 6


async def test_the_template_writes_the_prompt(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("x")
    await client.chat(
        messages=[
            {"role": "developer", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "me"},
            {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None},
            {"role": "user", "content": [{"type": "text", "text": t} for t in "cd"]},
        ]
    )
    start, end = 257, 258
    expected = []
    for role, text in [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c\nd")]:
        expected += [start, *f"{role}\n{text}".encode(), end, *b"\n"]
    assert generator.calls[0].prompt == [*expected, start, *b"assistant\n"]


async def test_max_tokens_defaults_to_the_rest_of_the_context(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x")
    await client.chat()
    await client.chat(max_tokens=3)
    await client.chat(max_completion_tokens=4)
    await client.chat(max_tokens=3, max_completion_tokens=5)
    room = MAX_MODEL_LEN - len(generator.calls[0].prompt)
    assert [call.sampling.max_tokens for call in generator.calls] == [room, 3, 4, 5]


@pytest.mark.parametrize("sizes", [(1,), (3,), (100,)])
async def test_streamed_is_what_whole_is(
    client: Client, generator: ScriptedGenerator, sizes: tuple[int, ...]
) -> None:
    text = "é漢👍🏽"
    generator.script = batches(text, *sizes)
    events = await client.stream_chat()
    assert joined(events) == text
    first = events[0]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert len({event["id"] for event in events[:-1]}) == 1
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [*[None] * (len(reasons) - 1), "stop"]
    assert (await client.chat())["choices"][0]["message"]["content"] == text


async def test_usage_comes_after_the_last_choice(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("Hello")
    *chunks, last, _ = await client.stream_chat(stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == (await client.chat())["usage"]


async def test_token_ids(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("👍b")
    whole = await client.chat(return_token_ids=True)
    assert whole["prompt_token_ids"] == generator.calls[0].prompt
    assert whole["choices"][0]["token_ids"] == [*"👍b".encode(), EOS]
    events = (await client.stream_chat(return_token_ids=True))[:-1]
    assert [("prompt_token_ids" in event) for event in events] == [True, False, False, False]
    ids = [token for e in events for token in e["choices"][0].get("token_ids", [])]
    assert ids == [*"👍b".encode(), EOS]


async def test_logprobs(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("añ", 1)
    whole = (await client.chat(logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]
    assert [entry["token"] for entry in whole["content"]] == ["a", "\ufffd", "\ufffd", "<|eos|>"]
    assert whole["content"][1]["bytes"] == [0xC3]
    assert whole["content"][0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    events = (await client.stream_chat(logprobs=True, top_logprobs=2))[1:-1]
    parts = [event["choices"][0]["logprobs"]["content"] for event in events]
    assert [entry for part in parts for entry in part] == whole["content"]
    assert [len(part) for part in parts] == [1, 2, 1]
    alone = (await client.chat(logprobs=True))["choices"][0]["logprobs"]
    assert alone["content"][0]["top_logprobs"] == []
