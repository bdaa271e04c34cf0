"""What tests of whole processes share: an environment of their own and a way to launch."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint.fake import write_fake_model
from tests.deploy.launch import Launched

Launch = Callable[..., Launched]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """The TMPDIR of the launched processes, with a path short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        yield Path(folder)


def give_weights(folder: Path, variant: str) -> Path:
    """Turn a fake model's folder into a tiny Llama's, with as much of the tokenizer as it knows."""
    source = Path(__file__).parents[1] / "golden" / "tiny" / variant
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder / name)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"].items()
    tokenizer["model"]["vocab"] = {text: token for text, token in vocabulary if token < size}
    tokenizer["added_tokens"] = []
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def launch(scratch: Path, cache: Path, tmp_path: Path) -> Iterator[Launch]:
    """Launch a command with some variables; what is left of it is killed after the test."""
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AIP_", "HEX", "HF_", "GRPC_"))
    }
    base |= {
        "TMPDIR": str(scratch),
        "HEXSERVE_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    launched: list[Launched] = []

    def start(*command: str, cwd: Path = tmp_path, **variables: str) -> Launched:
        launched.append(Launched(command, base | variables, cwd))
        return launched[-1]

    yield start
    for each in launched:
        each.end()
        print(each.output)  # shown where the test has failed


@pytest.fixture
def fake_folder(tmp_path: Path) -> Path:
    return write_fake_model(tmp_path / "fake")
