"""The responses API: its object, its events, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.errors import GenerationFailed
from tests.router.conftest import Client
from tests.router.fakes import ScriptedGenerator, batches
from tests.router.test_bad_input import check_error

PATH = "/v1/responses"
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


async def ask(client: Client, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, {"input": "hi", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(client: Client, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(PATH, {"input": "hi", "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for number, text in enumerate(response.text.split("\n\n")[:-1]):
        kind, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == kind.removeprefix("event: ")
        assert events[-1]["sequence_number"] == number
    return events


async def test_a_response_has_what_strict_clients_require(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("Hello")
    answer = await ask(client, metadata={"a": "b"}, instructions="Be brief.", temperature=0.5)
    assert answer["object"] == "response"
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert (answer["metadata"], answer["instructions"]) == ({"a": "b"}, "Be brief.")
    assert answer["temperature"] == 0.5
    (message,) = answer["output"]
    assert message["id"].startswith("msg_")
    assert message["content"] == [
        {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    ]
    prompt = generator.calls[0].prompt
    assert answer["usage"] == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + 6,
    }
    text = bytes(token for token in prompt if token < 256).decode()
    assert text == "system\nBe brief.\nuser\nhi\nassistant\n"


async def test_an_earlier_answer_can_be_sent_back(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("Hello")
    answer = await ask(client)
    question = {"type": "message", "role": "user", "content": "hi"}
    again = {"role": "user", "content": [{"type": "input_text", "text": "?"}]}
    await ask(client, input=[question, *answer["output"], again], max_output_tokens=2)
    text = bytes(token for token in generator.calls[1].prompt if token < 256).decode()
    assert text == "user\nhi\nassistant\nHello\nuser\n?\nassistant\n"


@pytest.mark.parametrize("cut", [False, True])
async def test_streamed_is_what_whole_is(
    client: Client, generator: ScriptedGenerator, cut: bool
) -> None:
    generator.script = batches("Hé 👍", 2)
    body = {**LOGPROBS, **({"max_output_tokens": 3} if cut else {})}
    whole = await ask(client, **body)
    assert whole["status"] == ("incomplete" if cut else "completed")
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    events = await stream(client, **body)
    kinds = [event["type"] for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole['status']}",
    ]
    (part,) = whole["output"][0]["content"]
    assert "".join(event["delta"] for event in deltas) == part["text"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    last = events[-1]["response"]
    assert last["output"][0]["content"] == [part]
    assert last["usage"] == whole["usage"]


async def test_an_error_inside_a_stream_is_its_last_event(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = [[97], GenerationFailed("lost")]
    *_, last = await stream(client)
    assert (last["type"], last["message"], last["code"]) == ("error", "lost", "generation_failed")
    assert last["error"]["message"] == "lost"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
        ({"input": "x" * 64}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1000}, "max_output_tokens"),
        ({"metadata": 1}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": None}}, "metadata"),
        ({"metadata": {"a" * 65: "a"}}, "metadata"),
        ({"metadata": {"a": "a" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_named(client: Client, fields: dict[str, Any], param: str) -> None:
    check_error(await client.post(PATH, {"input": "hi", **fields}), 400, param, param=param)


async def test_as_much_metadata_as_is_allowed_comes_back(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("Hello")
    metadata = {f"{number:é<64}": "é" * 512 for number in range(16)}
    assert (await ask(client, metadata=metadata))["metadata"] == metadata


@pytest.mark.parametrize("metadata", ['{"a": 1e999}', r'{"a": "\ud800"}', r'{"\ud800": "a"}'])
async def test_metadata_that_json_cannot_hold_is_refused_before_anything_is_generated(
    client: Client, generator: ScriptedGenerator, metadata: str
) -> None:
    body = f'{{"input": "hi", "metadata": {metadata}}}'
    check_error(await client.request("POST", PATH, content=body), 400, param="metadata")
    assert generator.calls == []
