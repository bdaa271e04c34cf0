"""From what a user calls a model to a folder on this machine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub import errors as hub_errors

from checkpoint.demo import fetch_demo_model
from checkpoint.errors import CheckpointError
from checkpoint.fake import cached_fake_model
from checkpoint.file_patterns import ALL_PATTERNS, TEXT_PATTERNS
from checkpoint.gcs import fetch_gcs
from checkpoint.weights import INDEX_FILE, SINGLE_FILE, no_safetensors

logger = logging.getLogger("hexserve.checkpoint")


def resolve(model: str, cache: Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """Returns the local folder of `model`, fetching it first where needed.

    `model` is `demo` (the demo model), `fake` (the fake model), a local folder, gs:// with a
    bucket and folder, or the id of a Hugging Face Hub repository, of which `revision` picks a
    branch, tag or commit; without `weights` only its configuration and tokenizer are fetched. A
    local folder that is called like one of the two words is reached as `./demo`. All but the
    hub's models lie in `cache`; the hub's library keeps its own.

    Raises:
        CheckpointError: there is no such model, or it cannot be fetched; the message says why.
    """
    patterns = ALL_PATTERNS if weights else TEXT_PATTERNS
    if model == "demo":
        return fetch_demo_model(cache)
    if model == "fake":
        return cached_fake_model(cache)
    if not model.strip():
        raise CheckpointError("the model's name is empty")
    if model.startswith("gs://"):
        return fetch_gcs(model, cache, patterns)
    if "://" in model:
        raise CheckpointError(f"{model}: not a folder and not the id of a hub repository")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{model}: must be a model folder, and this is a file")
    if _is_path(model):
        raise CheckpointError(f"{model}: no such folder")
    folder = _from_hub(model, revision, patterns)
    if weights:
        _check_weights(model, revision, folder)
    return folder


def _is_path(model: str) -> bool:
    """Whether a name can only be meant as a path: hub ids are `name` or `owner/name`."""
    return model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1


def _from_hub(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    logger.info("fetching %s from the Hugging Face Hub", repo)
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
        )
    except hub_errors.HFValidationError as error:
        raise CheckpointError(f"{repo}: neither a folder nor a hub id ({error})") from error
    except hub_errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo}: access to this model must be granted on its page at huggingface.co; "
            f"then log in (`hf auth login`, or set HF_TOKEN)"
        ) from error
    except hub_errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo}: no such folder, and no such model on the Hugging Face Hub "
            f"(or it is private and you are not logged in)"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo}: has no revision {revision!r}") from error
    except hub_errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repo}: no such folder, and the Hugging Face Hub cannot be reached "
            f"({_first_line(error)}). `demo` needs no hub"
        ) from error
    except OSError as error:  # network, quota, disk: the hub library's errors are OSErrors too
        raise CheckpointError(
            f"{repo}: cannot be fetched from the Hugging Face Hub ({_first_line(error)})"
        ) from error
    return Path(folder)


def _check_weights(repo: str, revision: str | None, folder: Path) -> None:
    """Raise CheckpointError where the repository has no safetensors; says what it has."""
    if (folder / SINGLE_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return
    try:
        names = huggingface_hub.list_repo_files(repo, revision=revision)
    except (
        OSError,
        httpx.HTTPError,
    ):  # offline, with a cached copy: the folder itself will have to do
        names = [path.name for path in folder.iterdir()]
    raise CheckpointError(no_safetensors(repo, names))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
