"""Families with windows by the command line: golden texts, whatever is let go of."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tests.deploy.conftest import Launch
from tests.deploy.launch import HEXSERVE, complete, get, wait_until
from tests.golden.family_models import MAX_MODEL_LEN, VARIANTS, VOCAB, stored_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
SERVE = (
    *HEXSERVE, "serve", "--port=0", "--dtype=float32", "--block_size=8",
    f"--max_model_len={MAX_MODEL_LEN}", "--max_decode_seqs=4", "--prefill_len_padding=8",
)  # fmt: skip


def give_family(folder: Path, variant: str) -> list[dict[str, Any]]:
    """Turn a fake model's folder into a tiny one of a family; returns its golden answers."""
    golden = json.loads((GOLDEN / f"{variant}.json").read_text())
    (folder / "config.json").write_text(json.dumps(VARIANTS[variant]))
    save_file(stored_tensors(VARIANTS[variant], golden["seed"]), folder / "model.safetensors")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"].items()
    tokenizer["model"]["vocab"] = {text: token for text, token in vocabulary if token < VOCAB}
    tokenizer["added_tokens"] = []
    path.write_text(json.dumps(tokenizer))
    answers: list[dict[str, Any]] = golden["answers"]
    return answers


@pytest.mark.parametrize(
    ("variant", "flags", "keeps"),
    [
        ("gemma3", ("--num_blocks=40",), "6 layers keep the last 12 tokens alone"),
        (
            "gemma3",
            ("--disagg_topo=1,1", "--enable_chunked_prefill", "--prefill_chunk_tokens=16"),
            "6 layers keep the last 12",
        ),
        ("mistral", ("--disagg_topo=1,1",), "all layers keep the last 12 tokens alone"),
        ("gemma3", ("--disagg_topo=1,1", "--enable_prefix_cache_hbm"), "KV cache"),
    ],
)
def test_golden_texts(
    launch: Launch, fake_folder: Path, variant: str, flags: tuple[str, ...], keeps: str
) -> None:
    """Several at once; with 40 blocks some are preempted and go on."""
    answers = give_family(fake_folder, variant)
    server = launch(*SERVE, f"--model={fake_folder}", *flags)
    url = server.ready_url()
    server.wait_for(keeps)

    def ask(case: dict[str, Any]) -> list[int]:
        return complete(url, case["prompt"], len(case["output"]), temperature=0)

    cases = answers * 3
    with ThreadPoolExecutor(len(cases)) as pool:
        outputs = list(pool.map(ask, cases))
    assert outputs == [case["output"] for case in cases]
    workers = get(url, "/health").json()["workers"]
    assert {worker["compiles_after_ready"] for worker in workers} == {0}
    wait_until(lambda: nothing_is_owned(url), "all blocks come back")


def nothing_is_owned(url: str) -> bool:
    every = [worker["blocks"] for worker in get(url, "/health").json()["workers"]]
    return all(each["free"] + each["cached"] == each["total"] for each in every)
