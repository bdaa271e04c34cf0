"""The demo model in bfloat16: disaggregated as colocated, and hardly worse than in float32."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.model.conftest import deployed

TEXT = Path(__file__).parents[2] / "LICENSE"
"""English prose that stays as it is."""
CHARACTERS = 6000


async def completion(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json={"temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def greedy_texts(url: str, prompts: list[list[int]]) -> list[list[int]]:
    """32 tokens after each prompt, all at once."""
    async with httpx.AsyncClient(base_url=url, timeout=280, trust_env=False) as client:
        options = {"max_tokens": 32, "ignore_eos": True, "return_token_ids": True}
        choices = await asyncio.gather(
            *(completion(client, prompt=prompt, **options) for prompt in prompts)
        )
    return [choice["token_ids"] for choice in choices]


async def perplexity(url: str) -> float:
    """Of TEXT's beginning."""
    text = TEXT.read_text(encoding="utf-8")[:CHARACTERS]
    async with httpx.AsyncClient(base_url=url, timeout=280, trust_env=False) as client:
        choice = await completion(client, prompt=text, max_tokens=1, echo=True, logprobs=0)
    first, *rest = choice["logprobs"]["token_logprobs"][:-1]
    assert first is None
    assert len(rest) > 1000
    return math.exp(-sum(rest) / len(rest))


@pytest.mark.full
@pytest.mark.model
@pytest.mark.timeout(1800)
async def test_bfloat16(tmp_path: Path, golden: dict[str, Any]) -> None:
    prompts = [case["prompt"] for case in golden["cases"]]
    with deployed("colocated", "float32", tmp_path) as url:
        in_float32 = await perplexity(url)
    with deployed("colocated", "bfloat16", tmp_path) as url:
        in_bfloat16 = await perplexity(url)
        colocated = await greedy_texts(url, prompts)
    assert in_bfloat16 == pytest.approx(in_float32, rel=0.005)
    for placement in ("1,1 by shm", "2,1"):
        with deployed(placement, "bfloat16", tmp_path) as url:
            assert await greedy_texts(url, prompts) == colocated, placement
