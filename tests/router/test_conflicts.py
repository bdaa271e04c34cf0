"""What no schema says, on every path: fields that conflict, ids, lengths, bodies of no JSON."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.chat_template import ChatTemplate
from tests.router.bodies import BODIES
from tests.router.conftest import Client
from tests.router.fakes import MAX_MODEL_LEN, VOCAB, ScriptedGenerator
from tests.router.test_bad_input import check_error

GENERATING = ("completion", "chat", "invoked chat", "response", "marked chat", "text instance",
              "chat instance")  # fmt: skip
CHATS = ("chat", "invoked chat", "response", "marked chat", "chat instance", "chat to tokenize")
PATHS = sorted({body.path for body in BODIES.values()})
LIMIT = {"response": "max_output_tokens"}
"""How a kind calls max_tokens, where it does not call it that."""
PROMPT = {"completion": "prompt", "text instance": "prompt", "response": "input"}

CONFLICTS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"stream_options": {"include_usage": True}}, "stream_options", ["stream=true"]),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", [str(VOCAB), f"0 to {VOCAB - 1}"]),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", ["1025 ids", "1024"]),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", [f"0 to {VOCAB - 1}", f'"{VOCAB}"']),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", ["each once", '"05"']),
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens", ["=4", "the 3 tokens of"]),
    ({"min_tokens": 1, "stop_token_ids": [*range(212)]}, "min_tokens", ["213 stop", "is 212"]),
    ({"max_tokens": 1000}, "max_tokens", ["=1000", f"{MAX_MODEL_LEN} tokens"]),
]


@pytest.mark.parametrize(("fields", "param", "parts"), CONFLICTS)
@pytest.mark.parametrize("kind", GENERATING)
async def test_what_fields_say_together_is_refused(
    client: Client,
    generator: ScriptedGenerator,
    kind: str,
    fields: dict[str, Any],
    param: str,
    parts: list[str],
) -> None:
    body, limit = BODIES[kind], LIMIT.get(kind, "max_tokens")
    fields = {limit if name == "max_tokens" else name: value for name, value in fields.items()}
    param = limit if param == "max_tokens" else param
    response = await client.post(body.path, body.wrap({**body.base, **fields}))
    check_error(response, 400, body.prefix + param, *parts, param=body.prefix + param)
    assert generator.calls == []


@pytest.mark.parametrize("alternatives", [1, 20])
@pytest.mark.parametrize("kind", CHATS[:-1])
async def test_alternatives_without_log_probabilities(
    client: Client, generator: ScriptedGenerator, kind: str, alternatives: int
) -> None:
    body = BODIES[kind]
    asked = {**body.base, "top_logprobs": alternatives}
    response = await client.post(body.path, body.wrap(asked))
    wanted = "logprobs" if kind == "response" else "logprobs=true"
    param = f"{body.prefix}top_logprobs"
    check_error(response, 400, f"{param}={alternatives}", wanted, param=param)
    assert generator.calls == []


def as_content(kind: str, content: Any) -> dict[str, Any]:
    """A body whose one message has this content."""
    name = "input" if kind == "response" else "messages"
    return {**BODIES[kind].base, name: [{"role": "user", "content": content}]}


@pytest.mark.parametrize("part", ["image_url", "input_image", "input_audio", "file"])
@pytest.mark.parametrize("kind", CHATS)
async def test_images_and_sounds_are_refused_as_such(client: Client, kind: str, part: str) -> None:
    body, name = BODIES[kind], PROMPT.get(kind, "messages")
    picture = {"type": part, part: {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "input_text" if kind == "response" else "text", "text": "What is this?"}
    asked = as_content(kind, [text, picture])
    response = await client.post(body.path, body.wrap(asked))
    param = f"{body.prefix}{name}[0].content[1].type"
    check_error(response, 400, f'{param}="{part}"', "the model reads text", param=param)


@pytest.mark.parametrize("kind", GENERATING)
async def test_a_prompt_too_long_is_told_both_numbers(client: Client, kind: str) -> None:
    body, name = BODIES[kind], PROMPT.get(kind, "messages")
    text = "x" * 100
    asked = {**body.base, "prompt": text} if name == "prompt" else as_content(kind, text)
    response = await client.post(body.path, body.wrap(asked))
    param = body.prefix + name
    check_error(response, 400, f"{param} has", f"{MAX_MODEL_LEN} tokens", param=param)
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        ("completion", {"prompt": [1, VOCAB]}, "prompt"),
        ("completion", {"prompt": [[1], [2, VOCAB]]}, "prompt[1]"),
        ("text instance", {"prompt": [1, VOCAB], "raw_response": True}, "prompt"),
        ("detokenize", {"tokens": [1, VOCAB]}, "tokens"),
    ],
)
async def test_ids_outside_the_vocabulary(
    client: Client, kind: str, fields: dict[str, Any], name: str
) -> None:
    body = BODIES[kind]
    response = await client.post(body.path, body.wrap({**body.base, **fields}))
    param = body.prefix + name
    check_error(response, 400, f"{param}[1]", f"0 to {VOCAB - 1}", f"got {VOCAB}", param=param)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('no such order') }}", "no such order"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "the chat template failed"),
        ("{{ messages[9].content.text }}", "no element 9"),
        ("{{ 'x' * 10000000 }}", "renders more than 4,194,304 characters"),
    ],
)
@pytest.mark.parametrize("kind", CHATS)
async def test_a_template_that_raises(client: Client, kind: str, template: str, told: str) -> None:
    client = client.with_context(chat_template=ChatTemplate({"default": template}, {}))
    body = BODIES[kind]
    response = await client.post(body.path, body.wrap(body.base))
    param = body.prefix + PROMPT.get(kind, "messages")
    check_error(response, 400, "template", told, param=param)


@pytest.mark.parametrize("kind", CHATS)
async def test_a_model_without_a_template(client: Client, kind: str) -> None:
    body = BODIES[kind]
    response = await client.with_context(chat_template=None).post(body.path, body.wrap(body.base))
    check_error(response, 400, "no chat template")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["JSON"]),
        (b"{", ["JSON", "line 1"]),
        (b"[]", ["object", "[]"]),
        (b'"x"', ["object"]),
        (b'{"n": NaN}', ["NaN"]),
        (b'{"n": -Infinity}', ["-Infinity"]),
        (b'{"n": "\xff"}', ["UTF-8", "byte 7"]),
        (b"[" * 100_000, ["nested"]),
        (b'{"n": ' + b"1" * 5000 + b"}", ["JSON"]),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_no_json_object(
    client: Client, path: str, content: bytes, parts: list[str]
) -> None:
    client = client.with_context(drain_worker=lambda _: None)
    check_error(await client.request("POST", path, content=content), 400, *parts)


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_of_50_mb(client: Client, path: str) -> None:
    client = client.with_context(drain_worker=lambda _: None)
    body = b'{"prompt": "' + b"x" * 50_000_000 + b'"}'
    response = await client.request("POST", path, content=body)
    check_error(response, 413, "50000014 bytes", "the limit is 10485760 bytes")
    assert response.headers["connection"] == "close"
