"""The prefix cache by the command line: long shared prefixes, usage, metrics, and golden texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

from tests.deploy.conftest import Launch, give_weights
from tests.deploy.launch import HEXSERVE, completion_body, expected_tokens, get, wait_until

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny" / "tied_llama3"
SERVE = (*HEXSERVE, "serve", "--port=0", "--enable_prefix_cache_hbm")
SYSTEM = [i * i % 500 for i in range(16_384)]

colocated_and_apart = pytest.mark.parametrize("topology", [(), ("--disagg_topo=1,1",)], ids=str)


def ask(url: str, prompt: list[int], count: int, **more: object) -> tuple[list[int], int]:
    """Token ids of a completion, and how many of its prompt were not computed."""
    body = completion_body(prompt, count, **more)
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    return answer.json()["choices"][0]["token_ids"], details["cached_tokens"]


def metric(url: str, name: str) -> float:
    lines = get(url, "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def all_kept(url: str) -> bool:
    every = [worker["blocks"] for worker in get(url, "/health").json()["workers"]]
    return all(
        blocks["cached"] >= len(SYSTEM) // 32
        and blocks["free"] + blocks["cached"] == blocks["total"]
        for blocks in every
    )


@colocated_and_apart
def test_a_prefix_of_16k_tokens_is_computed_once(launch: Launch, topology: tuple[str, ...]) -> None:
    url = launch(*SERVE, "--model=fake", *topology).ready_url()
    cold = [*SYSTEM, 1, 2]
    assert ask(url, cold, 20) == (expected_tokens(cold, 20), 0)
    for more in ([], [3, 4], [1, 2, *expected_tokens(cold, 20), 5]):
        prompt = [*SYSTEM, *more]
        found = len(SYSTEM) if more else len(SYSTEM) - 64  # the last token is always computed
        assert ask(url, prompt, 20) == (expected_tokens(prompt, 20), found)
    hits = 3 * len(SYSTEM) - 64
    wait_until(lambda: metric(url, "vllm:prefix_cache_hits_total") == hits, "hits are told")
    asked = 4 * len(SYSTEM) + 2 + 2 + 23
    # Two workers tell of one request, and each in its own time.
    wait_until(lambda: metric(url, "vllm:prefix_cache_queries_total") == asked, "queries are told")
    wait_until(lambda: all_kept(url), "nothing is owned, and the prefix is kept")


@pytest.mark.parametrize("topology", [(), ("--disagg_topo=1,1",), ("--disagg_topo=2,1",)], ids=str)
def test_golden_texts_stay_as_they_are(
    launch: Launch, fake_folder: Path, tmp_path: Path, topology: tuple[str, ...]
) -> None:
    model = give_weights(shutil.copytree(fake_folder, tmp_path / "llama"), GOLDEN.name)
    flags = ("--dtype=float32", "--prefill_len_padding=8", "--block_size=8", *topology)
    url = launch(*SERVE, f"--model={model}", *flags).ready_url()
    cases = json.loads((GOLDEN / "answers.json").read_text())
    known = [[*case["prompt"], *case["output"][:-1]] for case in cases]
    blocks = {tuple(its[:end]) for its in known for end in range(8, len(its) + 1, 8)}
    for again in (False, True):
        if again:  # the router sends a prompt to whoever has it, once it has been told
            wait_until(lambda: metric(url, "hexserve:prefix_index_blocks") == len(blocks), "told")
        for case in cases:
            prompt, wanted = case["prompt"], case["output"]
            found = (len(prompt) - 1) // 8 * 8 if again else 0
            assert ask(url, prompt, len(wanted), temperature=0) == (wanted, found)
    workers = get(url, "/health").json()["workers"]
    assert {worker["compiles_after_ready"] for worker in workers} == {0}


def test_few_uncached_tokens_are_prefilled_where_they_are_decoded(launch: Launch) -> None:
    flags = ("--disagg_topo=1,1", "--decode_may_prefill", "--model=fake")
    url = launch(*SERVE, *flags).ready_url()
    prompt = SYSTEM[:4096]
    assert ask(url, prompt, 40) == (expected_tokens(prompt, 40), 0)
    sent = {place: routed(url, place) for place in ("prefill", "decode", "local")}
    assert sent == {"prefill": len(prompt), "decode": len(prompt), "local": 0}
    turn = [*prompt, *expected_tokens(prompt, 40), 7, 8]
    # Both have the prompt; the decode worker alone has what it generated.
    wait_until(lambda: metric(url, "hexserve:prefix_index_blocks") > len(prompt) // 32, "it tells")
    answer, cached = ask(url, turn, 20)
    assert answer == expected_tokens(turn, 20)
    assert cached >= len(prompt)
    assert {place: routed(url, place) for place in sent} == sent | {"local": len(turn)}


def routed(url: str, place: str) -> float:
    """Tokens of the prompts that the router has sent to one kind of place."""
    lines = get(url, "/metrics").text.splitlines()
    told = [line for line in lines if line.startswith("hexserve:routed_asked_tokens_total{")]
    return next(float(line.split()[-1]) for line in told if f'place="{place}"' in line)
