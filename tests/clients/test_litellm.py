"""litellm, whole and streamed, synchronous and asynchronous, in each way that it knows vLLM."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.clients.conftest import Served

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # litellm's own are not ours to mend
]

MODELS = ("hosted_vllm/hexllm", "openai/hexllm")


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched
    return importlib.import_module("litellm")


def asked(served: Served, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "api_base": f"{served.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "seed": 1,
        "temperature": 0,
    }


@pytest.mark.parametrize("model", MODELS)
async def test_chat(litellm: Any, served: Served, model: str) -> None:
    request = asked(served, model)
    whole = litellm.completion(**request)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens == 8
    streamed = litellm.completion(**request, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
    assert (await litellm.acompletion(**request)).choices[0].message.content == text
    pieces = [
        chunk.choices[0].delta.content or ""
        async for chunk in await litellm.acompletion(**request, stream=True)
    ]
    assert "".join(pieces) == text


def test_text_completion(litellm: Any, served: Served) -> None:
    request = asked(served, "text-completion-openai/hexllm")
    del request["messages"]
    whole = litellm.text_completion(prompt="p", **request).choices[0].text
    assert whole
    chunks = litellm.text_completion(prompt="p", stream=True, **request)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole


def test_an_error_is_litellms_own(litellm: Any, served: Served) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked(served, MODELS[1]) | {"temperature": 5})
