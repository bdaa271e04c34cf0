"""Log-probabilities of chats, held to transformers' log-softmax in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_chat.json"
WITHIN = 1e-3

Entry = dict[str, Any]


async def check_chats(url: str) -> None:
    """Whole and streamed, the first token's too, and whatever the sampling is."""
    cases = json.loads(GOLDEN.read_text())["cases"]
    async with httpx.AsyncClient(base_url=url, timeout=280, trust_env=False) as client:
        for case in cases:
            body = {
                "messages": case["messages"],
                "max_tokens": len(case["output"]),
                "ignore_eos": True,
                "return_token_ids": True,
                "logprobs": True,
                "top_logprobs": len(case["top"][0]),
            }
            whole = await _whole(client, {**body, "temperature": 0})
            assert whole["token_ids"] == case["output"]
            content = whole["logprobs"]["content"]
            for entry, best in zip(content, case["top"], strict=True):
                _check(entry, best)
                assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
            assert await _streamed(client, {**body, "temperature": 0}) == content
            # They are the model's own: neither temperature nor a penalty is in them.
            sampled = {"temperature": 1.7, "top_p": 0.5, "seed": 3, "repetition_penalty": 2}
            drawn = await _whole(client, {**body, **sampled, "max_tokens": 1})
            _check(drawn["logprobs"]["content"][0], case["top"][0])


def _check(entry: Entry, best: list[tuple[str, float]]) -> None:
    told = entry["top_logprobs"]
    values = [each["logprob"] for each in told]
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx([value for _, value in best], abs=WITHIN)
    for each, (text, value) in zip(told, best, strict=True):
        close = sum(abs(value - other) < 2 * WITHIN for _, other in best)
        # Tokens that are as likely may have changed places; the last may be any of them.
        if close == 1 and each is not told[-1]:
            assert each["token"] == text


async def _whole(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Entry]:
    content: list[Entry] = []
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as got:
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                told = json.loads(line[6:])["choices"][0]["logprobs"]
                content += told["content"] if told else []
    return content
