"""Workers in one process: the tokens of a real model, and the same as in processes of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.deploy.conftest import Launch, give_weights
from tests.deploy.launch import HEXSERVE, complete, get

# Two query heads and one KV head, which two devices replicate.
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny" / "tied_llama3"


@pytest.fixture
def tiny_llama(fake_folder: Path, tmp_path: Path) -> Path:
    """A tiny Llama with the fake model's tokenizer."""
    return give_weights(shutil.copytree(fake_folder, tmp_path / "llama"), GOLDEN.name)


@pytest.mark.parametrize(
    ("topology", "flags"),
    [
        ("1,1", ["--worker_distributed_method=thread", "--kv_transports=device"]),
        ("1,1", ["--worker_distributed_method=thread", "--tensor_parallel_size=2"]),
        ("1,1", ["--worker_distributed_method=thread", "--kv_transports=grpc"]),
        ("1,1", ["--worker_distributed_method=mp"]),
        ("1,1", ["--kv_transports=jax", "--tensor_parallel_size=2"]),
    ],
    ids=["device to device", "on 2 devices each", "by grpc", "processes", "processes by jax"],
)
def test_every_placement_gives_the_golden_tokens(
    launch: Launch, tiny_llama: Path, topology: str, flags: list[str]
) -> None:
    launcher = launch(
        *HEXSERVE, "serve", f"--model={tiny_llama}", "--port=0", f"--disagg_topo={topology}",
        "--dtype=float32", *flags,
    )  # fmt: skip
    url = launcher.ready_url()
    cases = json.loads((GOLDEN / "answers.json").read_text())
    for case in cases:
        wanted = case["output"]
        assert complete(url, case["prompt"], len(wanted), temperature=0) == wanted
    workers = get(url, "/health").json()["workers"]
    assert {worker["compiles_after_ready"] for worker in workers} == {0}
