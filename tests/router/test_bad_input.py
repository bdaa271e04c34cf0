from __future__ import annotations

import json
from typing import Any

import pytest

from checkpoint.chat_template import ChatTemplate
from tests.router.conftest import Client
from tests.router.fakes import MAX_MODEL_LEN, VOCAB, ScriptedGenerator, batches

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"


FUNCTION = {"name": "f", "arguments": "[]"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def check_error(response: Any, status: int, *parts: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    for part in parts:
        assert part in body["error"]["message"]
    if param is not None:
        assert body["error"]["param"] == param


SHARED = [
    ({"temperature": 2.1}, "temperature", ["from 0 to 2", "2.1"]),
    ({"temperature": -1}, "temperature", ["from 0 to 2", "-1"]),
    ({"temperature": "hot"}, "temperature", ["number", '"hot"']),
    ({"temperature": True}, "temperature", ["number", "true"]),
    ({"temperature": 10**400}, "temperature", ["from 0 to 2"]),
    ({"top_p": 1.5}, "top_p", ["from 0 to 1", "1.5"]),
    ({"top_k": -2}, "top_k", ["at least -1", "-2"]),
    ({"top_k": 1.0}, "top_k", ["an integer", "1.0"]),
    ({"min_p": -0.1}, "min_p", ["from 0 to 1"]),
    ({"presence_penalty": 3}, "presence_penalty", ["from -2 to 2", "3"]),
    ({"frequency_penalty": -3}, "frequency_penalty", ["from -2 to 2"]),
    ({"repetition_penalty": 0}, "repetition_penalty", ["from 0.01 to 100"]),
    ({"seed": 1.5}, "seed", ["an integer", "1.5"]),
    ({"seed": True}, "seed", ["an integer", "true"]),
    ({"max_tokens": 0}, "max_tokens", ["at least 1", "0"]),
    ({"max_tokens": True}, "max_tokens", ["an integer", "true"]),
    ({"max_tokens": "5"}, "max_tokens", ["an integer", '"5"']),
    ({"max_tokens": 10**30}, "max_tokens", [str(MAX_MODEL_LEN)]),
    ({"stop": 5}, "stop", ["string or a list", "5"]),
    ({"stop": ""}, "stop", ["1 to 1024"]),
    ({"stop": ["a"] * 5}, "stop", ["5 strings", "limit is 4"]),
    ({"stop": ["a", 1]}, "stop", ["string", "1"]),
    ({"stop": "x" * 1025}, "stop", ["1025", "1024"]),
    ({"stop_token_ids": 3}, "stop_token_ids", ["list", "3"]),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", [str(VOCAB), f"0 to {VOCAB - 1}"]),
    ({"stop_token_ids": [True]}, "stop_token_ids", ["true"]),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", ["1025 ids", "limit is 1024"]),
    ({"ignore_eos": 1}, "ignore_eos", ["true or false", "1"]),
    ({"skip_special_tokens": "no"}, "skip_special_tokens", ["true or false"]),
    ({"return_token_ids": 0}, "return_token_ids", ["true or false"]),
    ({"stream": "yes"}, "stream", ["true or false"]),
    ({"stream_options": {"include_usage": True}}, "stream_options", ["stream=true"]),
    ({"stream": True, "stream_options": 1}, "stream_options", ["object"]),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        ["true or false"],
    ),
    ({"stream": True, "stream_options": {"huh": 1}}, "stream_options.huh", ["known field"]),
    ({"priority": 0.5}, "priority", ["an integer", "0.5"]),
    ({"priority": 2**31}, "priority", ["from -2147483648 to 2147483647", "2147483648"]),
    ({"priority": "high"}, "priority", ["an integer", '"high"']),
    ({"deadline_ms": 0}, "deadline_ms", ["from 1 to 86400000", "0"]),
    ({"deadline_ms": 86_400_001}, "deadline_ms", ["from 1 to 86400000", "86400001"]),
    ({"deadline_ms": True}, "deadline_ms", ["an integer", "true"]),
    ({"n": 0}, "n", ["from 1 to 128", "0"]),
    ({"n": 129}, "n", ["from 1 to 128", "129"]),
    ({"n": True}, "n", ["an integer", "true"]),
    ({"logit_bias": [5]}, "logit_bias", ["object", "[5]"]),
    ({"logit_bias": {"5": "1"}}, "logit_bias", ['logit_bias["5"]', "from -100 to 100", '"1"']),
    ({"logit_bias": {"5": True}}, "logit_bias", ["from -100 to 100", "true"]),
    ({"logit_bias": {"5": 100.5}}, "logit_bias", ["from -100 to 100", "100.5"]),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", [f"from 0 to {VOCAB - 1}", str(VOCAB)]),
    ({"logit_bias": {"-1": 1}}, "logit_bias", [f"from 0 to {VOCAB - 1}", "-1"]),
    ({"logit_bias": {"a": 1}}, "logit_bias", ['"a"']),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", ["999"]),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", ["each once"]),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", ["301 tokens", "limit is 300"]),
    ({"min_tokens": -1}, "min_tokens", ["at least 0", "-1"]),
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens", ["min_tokens=4", "3 tokens of max_tokens"]),
    (
        {"min_tokens": 1, "stop_token_ids": [*range(212)]},
        "min_tokens",
        ["213 stop tokens", "limit is 212"],
    ),
    ({"response_format": {"type": "json_object"}}, "response_format", ["json_object"]),
    ({"temprature": 1}, "temprature", ["known field"]),
    ({"model": 5}, "model", ["string", "5"]),
]


@pytest.mark.parametrize(("fields", "param", "parts"), SHARED)
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_a_wrong_field_is_named(
    client: Client, path: str, fields: dict[str, Any], param: str, parts: list[str]
) -> None:
    base = {"prompt": "p"} if path == COMPLETION else {"messages": user("p")}
    check_error(await client.post(path, {**base, **fields}), 400, *parts, param=param)


@pytest.mark.parametrize(
    ("fields", "param", "parts"),
    [
        ({}, "prompt", ["required"]),
        ({"prompt": None}, "prompt", ["required"]),
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"prompt": []}, "prompt", ["empty"]),
        ({"prompt": [[]]}, "prompt[0]", ["empty"]),
        ({"prompt": ["a", ""]}, "prompt[1]", ["empty"]),
        ({"prompt": ["a", 5]}, "prompt[1]", ["string or a list", "5"]),
        ({"prompt": [[1], [VOCAB]]}, "prompt[1]", ["prompt[1][0]", f"0 to {VOCAB - 1}"]),
        ({"prompt": 5}, "prompt", ["string or a list", "5"]),
        ({"prompt": {"a": 1}}, "prompt", ["string or a list"]),
        ({"prompt": ["a"] * 1025}, "prompt", ["1025 prompts", "limit is 1024"]),
        ({"prompt": ["a"] * 17, "n": 128}, "prompt", ["17 prompts", "128", "limit is 2048"]),
        ({"prompt": ["a", "b" * 64]}, "prompt[1]", ["64 tokens"]),
        ({"prompt": [1, "a"]}, "prompt", ["prompt[1]", '"a"']),
        ({"prompt": [1, True]}, "prompt", ["prompt[1]", "true"]),
        ({"prompt": [1, -1]}, "prompt", ["prompt[1]", "-1"]),
        ({"prompt": [VOCAB]}, "prompt", [str(VOCAB), f"0 to {VOCAB - 1}"]),
        ({"prompt": "a\ud800"}, "prompt", ["surrogate"]),
        ({"prompt": [10**30] * MAX_MODEL_LEN, "echo": True}, "prompt", [f"{MAX_MODEL_LEN} tok"]),
        ({"prompt": "p", "echo": True, "max_tokens": -1}, "max_tokens", ["at least 0", "-1"]),
        ({"prompt": "p", "echo": False, "max_tokens": 0}, "max_tokens", ["at least 1", "0"]),
        ({"prompt": "p", "suffix": "s"}, "suffix", ["suffix"]),
        ({"prompt": "p", "best_of": 129}, "best_of", ["from 1 to 128", "129"]),
        ({"prompt": "p", "n": 3, "best_of": 2}, "best_of", ["best_of=2", "n=3"]),
        ({"prompt": "p", "best_of": 2, "stream": True}, "best_of", ["streamed"]),
        ({"prompt": "p", "logprobs": 6}, "logprobs", ["from 0 to 5", "6"]),
        ({"prompt": "p", "logprobs": True}, "logprobs", ["integer", "true"]),
        ({"prompt": "p", "messages": []}, "messages", ["known field"]),
    ],
)
async def test_a_wrong_completion(
    client: Client, fields: dict[str, Any], param: str, parts: list[str]
) -> None:
    content = json.dumps(fields).encode()
    response = await client.request("POST", COMPLETION, content=content)
    check_error(response, 400, *parts, param=param)


@pytest.mark.parametrize(
    ("fields", "param", "parts"),
    [
        ({}, "messages", ["required"]),
        ({"messages": []}, "messages", ["empty"]),
        ({"messages": "hi"}, "messages", ["list"]),
        ({"messages": ["hi"]}, "messages[0]", ["object"]),
        ({"messages": [{}] * 2049}, "messages", ["2049 messages", "2048"]),
        ({"messages": [{"content": "x"}]}, "messages[0].role", ["user", "null"]),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", ["tool"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", ["null"]),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            ["assistant"],
        ),
        ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role", ["[]"]),
        ({"messages": [{"role": "user"}]}, "messages[0].content", ["required"]),
        ({"messages": user(5)}, "messages[0].content", ["5"]),
        ({"messages": user([])}, "messages[0].content", ["empty"]),
        ({"messages": user(["x"])}, "messages[0].content[0]", ["object"]),
        ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text", ["string"]),
        (
            {"messages": user([{"type": "image_url", "image_url": {"url": "x"}}])},
            "messages[0].content[0].type",
            ["image_url"],
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0]",
            ["function"],
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": 1}]}]},
            "messages[0].tool_calls[0].id",
            ["string"],
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [CALL | {"function": FUNCTION}]},
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            ["JSON of an object", "[]"],
        ),
        *(
            (
                {
                    "messages": [
                        {
                            "role": "assistant",
                            "tool_calls": [CALL | {"function": {"name": "f", "arguments": text}}],
                        }
                    ]
                },
                "messages[0].tool_calls[0].function.arguments",
                ["surrogate"],
            )
            for text in (r'{"a": "\ud800"}', r'{"\udfff": 1}', '{"a": NaN}', '{"a": -1e999}')
        ),
        (
            {"messages": [{"role": "user", "content": "x", "mood": 1}]},
            "messages[0].mood",
            ["known field"],
        ),
        ({"messages": user("x"), "logprobs": 1}, "logprobs", ["true or false"]),
        ({"messages": user("x"), "top_logprobs": 2}, "top_logprobs", ["logprobs=true"]),
        (
            {"messages": user("x"), "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            ["from 0 to 20", "21"],
        ),
        ({"messages": user("x"), "tools": [{}]}, "tools", ["not supported"]),
        ({"messages": user("x"), "tool_choice": "required"}, "tool_choice", ["required"]),
        ({"messages": user("x"), "functions": [{}]}, "functions", ["not supported"]),
        ({"messages": user("x"), "modalities": ["audio"]}, "modalities", ["audio"]),
        ({"messages": user("x"), "audio": {}}, "audio", ["not supported"]),
        (
            {"messages": user("x"), "max_completion_tokens": -1},
            "max_completion_tokens",
            ["at least 1"],
        ),
        (
            {"messages": user("x"), "max_completion_tokens": 1000},
            "max_completion_tokens",
            ["=1000", f"{MAX_MODEL_LEN} tokens"],
        ),
        ({"messages": user("x"), "prompt": "p"}, "prompt", ["known field"]),
    ],
)
async def test_a_wrong_chat(
    client: Client, fields: dict[str, Any], param: str, parts: list[str]
) -> None:
    check_error(await client.post(CHAT, fields), 400, *parts, param=param)


async def test_a_number_too_large_for_a_float(client: Client) -> None:
    body = b'{"prompt": "p", "temperature": 1e999}'
    response = await client.request("POST", COMPLETION, content=body)
    check_error(response, 400, "from 0 to 2", param="temperature")


async def test_of_a_large_value_the_beginning_is_shown(client: Client) -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    for value, shown in (
        ("x" * 5_000_000, '"xxx'),
        ([{"a": 1}] * 500_000, '[{"a": 1}, '),
        (deep, "[[["),
    ):
        response = await client.post(COMPLETION, {"prompt": "p", "temperature": value})
        check_error(response, 400, f"got {shown}", "…", param="temperature")
        assert len(response.text) < 250


@pytest.mark.parametrize(("path", "body"), [(COMPLETION, {"prompt": "p"}), (CHAT, {})])
async def test_an_unknown_model(client: Client, path: str, body: dict[str, Any]) -> None:
    response = await client.post(path, {**body, "model": "gpt-5"})
    check_error(response, 404, '"gpt-5"', "org/model", "alias", param="model")
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("model", ["", "hexllm", "alias", "org/model", None])
async def test_accepted_model_names(
    client: Client, generator: ScriptedGenerator, model: str | None
) -> None:
    generator.script = batches("x")
    answer = await client.complete(model=model)
    assert answer["model"] == ("alias" if model == "alias" else "org/model")


async def test_a_prompt_too_long_is_told_both_numbers(client: Client) -> None:
    response = await client.post(COMPLETION, {"prompt": [1] * MAX_MODEL_LEN, "max_tokens": 1})
    check_error(response, 400, f"{MAX_MODEL_LEN} tokens", param="prompt")
    response = await client.post(COMPLETION, {"prompt": "p" * 100})
    check_error(response, 400, "100 tokens", f"{MAX_MODEL_LEN} tokens", param="prompt")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    response = await client.post(CHAT, {"messages": user("x" * 90)})
    check_error(response, 400, f"{MAX_MODEL_LEN} tokens", param="messages")


async def test_max_tokens_beyond_the_context_is_told_both_numbers(client: Client) -> None:
    body = {"prompt": [1] * 10, "max_tokens": MAX_MODEL_LEN - 9}
    response = await client.post(COMPLETION, body)
    check_error(
        response,
        400,
        "10 tokens",
        f"{MAX_MODEL_LEN} tokens",
        f"={MAX_MODEL_LEN - 9}",
        param="max_tokens",
    )


async def test_a_body_over_the_limit(client: Client) -> None:
    client = client.with_context(max_body_bytes=100)
    response = await client.post(COMPLETION, {"prompt": "p" * 100})
    check_error(response, 413, "100 bytes")

    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 10

    check_error(await client.request("POST", COMPLETION, content=chunks()), 413, "100 bytes")
    response = await client.post(COMPLETION, {"prompt": "p" * 10_000})
    check_error(response, 413, "100 bytes")


async def test_unknown_paths_and_methods(client: Client) -> None:
    check_error(await client.get("/v1/nothing"), 404, "/v1/nothing")
    check_error(await client.get("/v1/models/nothing"), 404, '"nothing"')
    response = await client.get(COMPLETION)
    check_error(response, 405, "GET", COMPLETION)
    assert response.headers["allow"] == "POST"


async def test_a_template_that_writes_nothing(client: Client) -> None:
    empty = ChatTemplate({"default": ""}, {})
    response = await client.with_context(chat_template=empty).post(CHAT, {"messages": user("x")})
    check_error(response, 400, "no tokens", param="messages")


async def test_nothing_wrong_reaches_the_workers(
    client: Client, generator: ScriptedGenerator
) -> None:
    for fields, _, _ in SHARED:
        await client.post(COMPLETION, {"prompt": "p", **fields})
    assert generator.calls == []


async def test_fields_without_effect_are_taken(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x")
    neutral = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "n": 1,
        "logit_bias": {},
        "min_tokens": 0,
        "response_format": {"type": "text"},
        "seed": None,
        "stop": [],
    }
    await client.complete(**neutral, echo=False, suffix=None, best_of=1)
    await client.chat(
        **neutral, tools=[], tool_choice="none", parallel_tool_calls=True, modalities=["text"]
    )
