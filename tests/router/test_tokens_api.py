"""`/tokenize`, `/detokenize`, `/version`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from router.context import GatewayContext
from tests.router.conftest import Client
from tests.router.fakes import EOS, MAX_MODEL_LEN, VOCAB
from tests.router.test_bad_input import check_error

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_a_text_is_tokenized_and_back(client: Client) -> None:
    answer = (await client.post("/tokenize", {"prompt": "é<|eos|>"})).json()
    assert answer == {
        "count": 3,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": [0xC3, 0xA9, EOS],
        "token_strs": None,
    }
    back = await client.post("/detokenize", {"tokens": answer["tokens"], "model": "alias"})
    assert back.json() == {"prompt": "é<|eos|>"}
    answer = (await client.post("/tokenize", {"prompt": "ab", "return_token_strs": True})).json()
    assert answer["token_strs"] == ["a", "b"]
    assert (await client.post("/tokenize", {"prompt": ""})).json()["tokens"] == []
    assert (await client.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}


async def test_a_conversation_is_tokenized_as_the_template_writes_it(client: Client) -> None:
    start, end = 257, 258
    expected = [start, *b"user\nhi", end, *b"\n", start, *b"assistant\n"]
    answer = (await client.post("/tokenize", {"messages": MESSAGES})).json()
    assert answer["tokens"] == expected
    body = {"messages": MESSAGES, "add_generation_prompt": False}
    assert (await client.post("/tokenize", body)).json()["count"] == 10


async def test_long_texts_are_as_short_ones(client: Client, context: GatewayContext) -> None:
    body = {"prompt": "ab" * 10_000, "return_token_strs": True}
    answer = (await client.post("/tokenize", body)).json()
    assert answer["count"] == 20_000
    assert answer["token_strs"] == ["a", "b"] * 10_000
    back = await client.post("/detokenize", {"tokens": answer["tokens"]})
    assert back.json()["prompt"] == "ab" * 10_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "p", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"prompt": "p", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "p", "huh": 1}, "huh"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [], "huh": 1}, "huh"),
    ],
)
async def test_a_wrong_field_is_named(
    client: Client, path: str, body: dict[str, Any], param: str
) -> None:
    check_error(await client.post(path, body), 400, param, param=param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_another_model_is_refused(client: Client, path: str) -> None:
    body = {"model": "gpt-5", "prompt": "p", "tokens": []}
    check_error(await client.post(path, body), 404, '"gpt-5"')


async def test_the_version_is_told(client: Client) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", (await client.get("/version")).json()["version"])
