"""The demo model behind real deployments, one start per placement."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.launch import HEXSERVE, Launched

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2.json"
PLACEMENTS = {
    "colocated": (),
    **{topology: (f"--disagg_topo={topology}",) for topology in ("2,1", "1,2", "3,1")},
    **{
        f"1,1 by {transport}": ("--disagg_topo=1,1", f"--kv_transports={transport}")
        for transport in ("shm", "jax", "grpc")
    },
    "1,1 by device": (
        "--disagg_topo=1,1",
        "--worker_distributed_method=thread",
        "--kv_transports=device",
    ),
    "colocated in chunks": ("--enable_chunked_prefill", "--prefill_chunk_tokens=64"),
    "1,1 in chunks": ("--disagg_topo=1,1", "--enable_chunked_prefill", "--max_prefill_seqs=2"),
    # No more than the longest sequence needs: those beside it are preempted.
    "1,1 in few blocks": ("--disagg_topo=1,1", "--num_blocks=64"),
    # Nine heads and three KV heads: both sizes fill up with empty ones.
    "1,1 on 2 devices each": ("--disagg_topo=1,1", "--tensor_parallel_size=2"),
    "colocated on 4 devices": ("--tensor_parallel_size=4",),
    # Each prompt comes more than once.
    "colocated, prefixes kept": ("--enable_prefix_cache_hbm",),
    "1,1, prefixes kept": ("--disagg_topo=1,1", "--enable_prefix_cache_hbm"),
}
# Fewer programs than by default: a start without a compile cache takes less of the test's time.
FLAGS = (
    "--max_model_len=2048",
    "--prefill_len_padding=128",
    "--max_decode_seqs=16",
    "--decode_seqs_padding=4",
)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Texts from transformers, made by tests/golden/make_golden.py."""
    answers: dict[str, Any] = json.loads(GOLDEN.read_text())
    return answers


@contextmanager
def deployed(placement: str, dtype: str, folder: Path) -> Iterator[str]:
    """The URL of a deployment of the demo model that runs in `folder`."""
    launched = Launched(
        (*HEXSERVE, "serve", "--model=demo", f"--dtype={dtype}", "--port=0", *FLAGS,
         *PLACEMENTS[placement]),
        dict(os.environ),
        folder,
    )  # fmt: skip
    try:
        yield launched.wait_for(r"ready at (http://\S+)", timeout_s=280)[1]
    finally:
        launched.stop()
        launched.end()


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """(placement, URL) of a deployment of the demo model in float32."""
    placement: str = request.param
    with deployed(placement, "float32", tmp_path_factory.mktemp("run")) as url:
        yield placement, url
