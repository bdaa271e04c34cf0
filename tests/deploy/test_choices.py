"""Choices over HTTP, from a real model in real processes: tokens, usage, and no new programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.conftest import Launch, give_weights
from tests.deploy.launch import HEXSERVE, completion_body, get

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny" / "tied_llama3"
SERVE = (*HEXSERVE, "serve", "--port=0", "--dtype=float32", "--block_size=8")


@pytest.mark.parametrize(
    "flags",
    [(), ("--disagg_topo=1,1",), ("--disagg_topo=2,2", "--enable_prefix_cache_hbm")],
    ids=["colocated", "1,1", "2,2 cached"],
)
def test_choices_do_not_depend_on_how_many_there_are(
    launch: Launch, fake_folder: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    model = give_weights(shutil.copytree(fake_folder, tmp_path / "llama"), GOLDEN.name)
    url = launch(*SERVE, f"--model={model}", "--prefill_len_padding=8", *flags).ready_url()
    cases = json.loads((GOLDEN / "answers.json").read_text())
    prompts = [case["prompt"] for case in cases]

    def ask(prompt: Any, **more: object) -> dict[str, Any]:
        body = completion_body(prompt, 8, **more)
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    cold = ask(prompts[-1], n=4, seed=7, temperature=1.0)
    usage = cold["usage"]
    assert usage["prompt_tokens"] == len(prompts[-1])
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    alone = ask(prompts[-1], seed=7, temperature=1.0)["choices"][0]
    assert alone["token_ids"] == cold["choices"][0]["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in cold["choices"]}) > 1
    scored = ask(prompts[0], n=2, echo=True, logprobs=1, seed=1)
    first, second = (choice["logprobs"]["token_logprobs"] for choice in scored["choices"])
    assert first[: len(prompts[0])] == second[: len(prompts[0])]

    several = ask(prompts, n=2, temperature=0)
    assert several["usage"]["prompt_tokens"] == sum(map(len, prompts))
    for number, case in enumerate(cases):
        for choice in several["choices"][2 * number : 2 * number + 2]:
            assert choice["token_ids"] == case["output"][:8]
    workers = get(url, "/health").json()["workers"]
    assert {worker["compiles_after_ready"] for worker in workers} == {0}
