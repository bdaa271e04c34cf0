"""One disaggregated deployment of the fake model, which real clients are pointed at."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpoint.fake import FOLDER_NAME
from tests.deploy.launch import HEXSERVE, Launched

CLIENT_S = 180.0


@dataclass(frozen=True)
class Served:
    """Where the deployment is, and the folder of its tokenizer."""

    url: str
    tokenizer: Path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    environment = {**os.environ, "HEXSERVE_CACHE": str(folder), "JAX_PLATFORMS": "cpu"}
    command = (*HEXSERVE, "serve", "--model=fake", "--disagg_topo=1,1", "--port=0")
    launched = Launched(command, environment, folder)
    try:
        yield Served(launched.ready_url(), folder / FOLDER_NAME)
        launched.stop()
    finally:
        launched.end()


def run_client(command: Sequence[str], folder: Path) -> str:
    """Run a client's program to its end, which must be a good one; returns what it printed.

    Nothing may be fetched: its caches are in `folder`, and the hub is told to be offline.
    """
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run(
        (str(program), *command[1:]),
        cwd=folder,
        env=os.environ | {
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=CLIENT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout
