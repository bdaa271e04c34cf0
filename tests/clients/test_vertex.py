"""The documented bodies of Vertex AI's and Hex-LLM's clients, on a deployment."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.clients.conftest import Served

pytestmark = pytest.mark.clients

PROMPT = "What is a car?"
INSTANCE = {"prompt": PROMPT, "max_tokens": 50, "temperature": 1.0, "top_p": 1.0, "top_k": 1}
CHAT = {
    "@requestFormat": "chatCompletions",
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": 100,
}


def posted(served: Served, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{served.url}{path}", json=body, timeout=30, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


def test_predict(served: Served) -> None:
    raw = {**INSTANCE, "raw_response": True}
    (text,) = posted(served, "/generate", {"instances": [raw]})["predictions"]
    assert text
    (whole,) = posted(served, "/generate", {"instances": [INSTANCE]})["predictions"]
    assert whole == f"Prompt:\n{PROMPT}\nOutput:\n{text}"
    several = [raw, {**raw, "prompt": "What is a bus?"}]
    predictions = posted(served, "/generate", {"instances": several})["predictions"]
    assert predictions[0] == text
    assert len(predictions) == 2


def test_predict_in_the_chat_format(served: Served) -> None:
    prediction = posted(served, "/generate", {"instances": [CHAT]})["predictions"]
    assert prediction["object"] == "chat.completion"
    assert prediction["choices"][0]["message"]["role"] == "assistant"


def test_raw_predict_forwards_a_chat_and_any_route(served: Served) -> None:
    assert posted(served, "/generate", CHAT)["object"] == "chat.completion"
    chat = {"model": "", "messages": CHAT["messages"], "max_tokens": 10}
    answer = posted(served, "/invoke/v1/chat/completions", chat)
    assert answer["object"] == "chat.completion"
