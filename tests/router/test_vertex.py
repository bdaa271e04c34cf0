from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router import choices
from router.errors import GenerationFailed
from tests.router.conftest import Client, parse_events
from tests.router.fakes import Pause, ScriptedGenerator, batches
from tests.router.test_bad_input import check_error

CHAT = {
    "@requestFormat": "chatCompletions",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 20,
}


async def predict(client: Client, *instances: Any, **body: Any) -> Any:
    response = await client.post("/generate", {"instances": list(instances), **body})
    assert response.status_code == 200, response.text
    assert set(response.json()) == {"predictions"}
    return response.json()["predictions"]


async def test_the_documented_request(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("A car")
    instance = {
        "prompt": "What is a car?",
        "max_tokens": 50.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 1.0,
    }
    assert await predict(client, instance) == ["Prompt:\nWhat is a car?\nOutput:\nA car"]
    assert generator.calls[0].sampling.top_k == 1
    assert generator.calls[0].sampling.max_tokens == 50
    assert await predict(client, {**instance, "raw_response": True}) == ["A car"]


async def test_instances_run_at_once_and_answer_in_order(
    client: Client, generator: ScriptedGenerator
) -> None:
    pause = Pause()

    def script(prompt: list[int]) -> Any:
        if prompt == [*b"first"]:
            yield pause
        else:
            pause.event.set()
        yield [*prompt[:3], 256]

    generator.script = script
    predictions = await predict(
        client,
        {"prompt": "first", "raw_response": True},
        {"prompt": "second", "raw_response": True},
    )
    assert predictions == ["fir", "sec"]


async def test_parameters_are_for_all_instances(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x")
    await predict(
        client, {"prompt": "a"}, {"prompt": "b", "max_tokens": 2}, parameters={"max_tokens": 7}
    )
    assert [call.sampling.max_tokens for call in generator.calls] == [7, 2]


async def test_chat_instances(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("Hello")
    prediction = await predict(client, CHAT)
    assert prediction["object"] == "chat.completion"
    assert prediction["choices"][0]["message"]["content"] == "Hello"
    both = await predict(client, CHAT, {"prompt": "p", "raw_response": True})
    assert both[0]["object"] == "chat.completion"
    assert both[1] == "Hello"
    first, second = await predict(client, CHAT, CHAT)
    assert first["id"] != second["id"]


async def test_a_body_that_is_a_chat_itself(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("Hello")
    answer = (await client.post("/generate", CHAT)).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"
    response = await client.post("/generate", {**CHAT, "stream": True})
    assert parse_events(response.text)[-1] == "[DONE]"


@pytest.mark.parametrize("raw_response", [False, True])
async def test_a_single_instance_is_streamed(
    client: Client, generator: ScriptedGenerator, raw_response: bool
) -> None:
    generator.script = batches("A long car", 3)
    instance = {"prompt": "What?", "raw_response": raw_response}
    (whole,) = await predict(client, instance)
    response = await client.post("/generate", {"instances": [{**instance, "stream": True}]})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = parse_events(response.text)
    assert done == "[DONE]"
    assert len(events) > 2
    assert "".join(event["predictions"][0] for event in events) == whole
    generator.script = [[97], GenerationFailed("lost")]
    body = {"instances": [{"prompt": "p"}], "parameters": {"stream": True}}
    *_, last = parse_events((await client.post("/generate", body)).text)
    assert last["error"]["message"] == "lost"


async def test_a_single_chat_instance_is_streamed(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("Hello")
    response = await client.post("/generate", {"instances": [{**CHAT, "stream": True}]})
    *events, done = parse_events(response.text)
    assert done == "[DONE]"
    assert events[0]["object"] == "chat.completion.chunk"


async def test_arbitrary_routes_are_invoked(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("x")
    body = {"prompt": "p", "model": ""}
    answer = (await client.post("/invoke/v1/completions", body)).json()
    assert answer["object"] == "text_completion"
    assert (await client.get("/invoke/ping")).status_code == 200
    check_error(await client.get("/invoke/invoke/ping"), 404)
    check_error(await client.get("/invoked/ping"), 404)


@pytest.mark.parametrize(
    ("instance", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "p", "dynamic-lora": "gs://b/a"}, "dynamic-lora"),
        ({"prompt": "p", "stream": True}, "stream"),
        ({"prompt": "p", "top_k": 1.5}, "top_k"),
        ({"prompt": "p", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "p", "max_tokens": 1000}, "max_tokens"),
        ({"prompt": "p", "raw_response": "yes"}, "raw_response"),
        ({"prompt": "p", "logprobs": 1}, "logprobs"),
        ({"prompt": "p", "n": 2}, "n"),
        ({"prompt": "p", "best_of": 2}, "best_of"),
        ({"prompt": "p", "echo": True}, "echo"),
        ({"prompt": ["p", "q"], "raw_response": True}, "prompt"),
        ({"prompt": "p", "huh": 1}, "huh"),
        ({"@requestFormat": "images"}, "@requestFormat"),
        ({"@requestFormat": "chatCompletions"}, "messages"),
        ({"@requestFormat": "chatCompletions", "messages": [1]}, "messages[0]"),
    ],
)
async def test_a_wrong_instance_is_named(
    client: Client, generator: ScriptedGenerator, instance: dict[str, Any], param: str
) -> None:
    generator.script = batches("x")
    response = await client.post("/generate", {"instances": [{"prompt": "ok"}, instance]})
    check_error(response, 400, f"instances[1].{param}", param=f"instances[1].{param}")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"instances": []},
        {"instances": "p"},
        {"instances": ["p"]},
        {"instances": [{"prompt": "p"}] * 257},
        {"instances": [{"prompt": "p"}], "parameters": 1},
        {"instances": [{"prompt": "p"}], "huh": 1},
        {"@requestFormat": "x"},
    ],
)
async def test_a_wrong_body(client: Client, body: dict[str, Any]) -> None:
    check_error(await client.post("/generate", body), 400)


async def test_a_failed_instance_ends_the_others(
    client: Client, generator: ScriptedGenerator
) -> None:
    def script(prompt: list[int]) -> Any:
        yield [1]
        if prompt == [*b"bad"]:
            raise GenerationFailed("lost")
        yield Pause()

    generator.script = script
    response = await asyncio.wait_for(
        client.post("/generate", {"instances": [{"prompt": "good"}, {"prompt": "bad"}]}), 5
    )
    check_error(response, 500, "lost")
    assert all(call.closed.is_set() for call in generator.calls)


async def test_other_routes_for_predictions_and_health(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x")
    client = client.with_context(predict_route="/predict", health_route="/ready")
    body = {"instances": [{"prompt": "p"}]}
    for path in ("/generate", "/predict"):
        assert (await client.post(path, body)).status_code == 200
    for path in ("/ping", "/ready"):
        assert (await client.get(path)).status_code == 200
    client = client.with_context(predict_route="/v1/completions", health_route="/health")
    assert (await client.complete())["object"] == "text_completion"
    assert (await client.get("/health")).json()["ready"] is True


async def test_many_instances_go_to_the_workers_bit_by_bit(
    client: Client, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "MAX_AT_ONCE", 3)
    running: list[int] = []

    def script(prompt: list[int]) -> Any:
        running.append(sum(not call.closed.is_set() for call in generator.calls))
        yield [97]
        yield [256]

    generator.script = script
    chat = {**CHAT, "n": 4}
    predictions = await predict(client, chat, *[{"prompt": "p", "raw_response": True}] * 8)
    assert predictions[1:] == ["a"] * 8
    assert len(predictions[0]["choices"]) == 4
    assert max(running) == 3
    siblings = [call.siblings for call in generator.calls]
    assert siblings.count(None) == 8
    assert len(set(siblings) - {None}) == 1
