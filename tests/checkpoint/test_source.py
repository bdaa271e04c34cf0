from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from checkpoint.config import read_config
from checkpoint.errors import CheckpointError
from checkpoint.fake import MODEL_TYPE
from checkpoint.source import resolve


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """Where the hub's library puts its files."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, downloaded: Path) -> list[Any]:
    """Replaces the hub: calls are listed, and none leaves this machine."""
    calls: list[Any] = []

    def download(repo: str, **options: Any) -> str:
        huggingface_hub.utils.validate_repo_id(repo)
        calls.append((repo, options))
        return str(downloaded)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(repo: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def make(kind: type[Exception]) -> Exception:
    """An error of the hub's, whose constructors want a response, without one."""
    error = kind.__new__(kind)
    Exception.__init__(error, "details")
    return error


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path), tmp_path / "cache") == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    tmp_path.joinpath("model").mkdir()
    assert resolve("~/model", tmp_path / "cache") == tmp_path / "model"


def test_fake(tmp_path: Path) -> None:
    assert read_config(resolve("fake", tmp_path)).model_type == MODEL_TYPE


def test_hub(tmp_path: Path, hub: list[Any], downloaded: Path) -> None:
    assert resolve("owner/name", tmp_path, revision="v1") == downloaded
    ((repo, options),) = hub
    assert repo == "owner/name"
    assert options["revision"] == "v1"
    assert not any("bin" in pattern for pattern in options["allow_patterns"])


def test_hub_without_the_weights(tmp_path: Path, hub: list[Any]) -> None:
    resolve("owner/name", tmp_path, weights=False)
    ((_, options),) = hub
    assert options["allow_patterns"] == ["*.json", "*.jinja", "tokenizer.model"]


def test_a_repository_with_pickled_weights_alone(
    tmp_path: Path, downloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (downloaded / "model.safetensors").unlink()
    listed = ["config.json", "pytorch_model-00001-of-00002.bin"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: listed)
    with pytest.raises(CheckpointError, match=r"owner/name: no safetensors.*\.bin.*convert"):
        resolve("owner/name", tmp_path)
    resolve("owner/name", tmp_path, weights=False)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "empty"),
        ("s3://bucket/model", "not a folder"),
        ("/no/such/folder", "no such folder"),
        ("./absent", "no such folder"),
        ("~/absent-model", "no such folder"),
        ("models/a/b", "no such folder"),
        ("absent/", "no such folder"),
        ("a b", "neither a folder nor a hub id"),
    ],
)
def test_bad_names(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve(model, tmp_path)


def test_file_instead_of_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(CheckpointError, match="must be a model folder"):
        resolve(str(path), tmp_path)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (make(hub_errors.GatedRepoError), "must be granted"),
        (make(hub_errors.RepositoryNotFoundError), "no such model on the Hugging Face Hub"),
        (make(hub_errors.RevisionNotFoundError), "has no revision 'v9'"),
        (make(hub_errors.LocalEntryNotFoundError), "cannot be reached"),
        (make(hub_errors.HfHubHTTPError), "cannot be fetched"),
        (hub_errors.OfflineModeIsEnabled("offline"), "cannot be fetched.*offline"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_hub_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    fail_with(monkeypatch, error)
    with pytest.raises(CheckpointError, match=f"owner/name.*{message}"):
        resolve("owner/name", tmp_path, revision="v9")


def test_cache_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(CheckpointError, match="cannot write the fake model"):
        resolve("fake", blocked)
    with pytest.raises(CheckpointError, match="cannot make the demo model"):
        resolve("demo", blocked)
