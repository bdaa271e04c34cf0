from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint import part_file
from checkpoint.errors import CheckpointError
from checkpoint.gcs import split_url
from checkpoint.source import resolve
from tests.checkpoint.fake_gcs import FakeGcs, serving

# Of the client library, which would use gRPC where it is whole.
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")

URL = "gs://models/llama/8b"
WEIGHTS = bytes(range(256)) * 10  # 2560 bytes, three parts
FILES = {
    "config.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
}


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    fake = FakeGcs()
    for name, data in FILES.items():
        fake.put("models", f"llama/8b/{name}", data)
    fake.put("models", "llama/8b/pytorch_model.bin", b"pickled")
    fake.put("models", "llama/8b/original/model.safetensors", b"deeper")
    fake.put("models", "llama/8b-chat/config.json", b"another model")
    monkeypatch.setattr(part_file.PartFile.__init__, "__defaults__", (1000,))
    with serving(fake) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield fake


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


def test_the_models_files_are_fetched_and_no_others(gcs: FakeGcs, tmp_path: Path) -> None:
    folder = resolve(URL, tmp_path)
    assert folder == tmp_path / "gcs" / "models" / "llama" / "8b"
    assert files(folder) == FILES
    assert {p.name for p in folder.iterdir()} - FILES.keys() == {".lock", ".generations.json"}


def test_no_object_takes_the_place_of_a_file_of_the_fetching(gcs: FakeGcs, tmp_path: Path) -> None:
    kept = tmp_path / "gcs" / "models" / "llama" / "kept.safetensors"
    gcs.put("models", "llama/8b/.generations.json", b'{"../kept.safetensors": 1}')
    folder = resolve(URL, tmp_path)
    kept.touch()
    assert all(name != "llama/8b/.generations.json" for name, _ in gcs.fetched)
    resolve(URL, tmp_path)
    assert kept.exists()
    assert files(folder) == FILES


def test_a_whole_bucket_and_a_slash_at_the_end(gcs: FakeGcs, tmp_path: Path) -> None:
    gcs.put("flat", "config.json", b"{}")
    assert files(resolve("gs://flat", tmp_path, weights=False)) == {"config.json": b"{}"}
    assert resolve(f"{URL}/", tmp_path) == resolve(URL, tmp_path)


def test_nothing_is_fetched_twice_but_what_has_changed(gcs: FakeGcs, tmp_path: Path) -> None:
    resolve(URL, tmp_path, weights=False)
    assert ("llama/8b/model.safetensors", 0) not in gcs.fetched
    gcs.fetched.clear()
    resolve(URL, tmp_path)
    assert {name for name, _ in gcs.fetched} == {"llama/8b/model.safetensors"}
    gcs.fetched.clear()
    gcs.put("models", "llama/8b/config.json", b"{ }")
    folder = resolve(URL, tmp_path)
    assert gcs.fetched == [("llama/8b/config.json", 0)]
    assert files(folder) == FILES | {"config.json": b"{ }"}


def test_what_the_bucket_has_no_more_goes(gcs: FakeGcs, tmp_path: Path) -> None:
    """A file of weights that is left over would be taken for a part of the model."""
    resolve(URL, tmp_path)
    del gcs.objects["models", "llama/8b/model.safetensors"]
    gcs.put("models", "llama/8b/model-00001-of-00001.safetensors", b"new")
    gcs.put("models", "llama/8b/model.safetensors.index.json", b"{}")
    left = {name for name in files(resolve(URL, tmp_path)) if name.endswith("safetensors")}
    assert left == {"model-00001-of-00001.safetensors"}


def test_a_broken_download_goes_on_where_it_was(gcs: FakeGcs, tmp_path: Path) -> None:
    gcs.broken_from = 2000
    with pytest.raises(CheckpointError, match=r"gs://models/llama/8b: cannot be fetched.*is cut"):
        resolve(URL, tmp_path)
    folder = tmp_path / "gcs" / "models" / "llama" / "8b"
    assert "model.safetensors" not in files(folder)
    gcs.broken_from = None
    before = set(gcs.fetched)
    gcs.fetched.clear()
    assert files(resolve(URL, tmp_path)) == FILES
    assert ("llama/8b/model.safetensors", 2000) in gcs.fetched
    assert not before & set(gcs.fetched)


def test_parts_of_an_older_state_are_thrown_away(gcs: FakeGcs, tmp_path: Path) -> None:
    gcs.broken_from = 2000
    with pytest.raises(CheckpointError):
        resolve(URL, tmp_path)
    gcs.broken_from = None
    gcs.put("models", "llama/8b/model.safetensors", WEIGHTS[::-1])
    folder = resolve(URL, tmp_path)
    assert files(folder) == FILES | {"model.safetensors": WEIGHTS[::-1]}
    assert not list(folder.glob(".*.part"))


def test_a_wrong_checksum_is_refused_and_fetched_anew(gcs: FakeGcs, tmp_path: Path) -> None:
    gcs.lie.add("llama/8b/model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has arrived with a wrong check"):
        resolve(URL, tmp_path)
    assert not (tmp_path / "gcs/models/llama/8b/model.safetensors").exists()
    gcs.lie.clear()
    assert files(resolve(URL, tmp_path)) == FILES


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://absent/model", "no such bucket"),
        ("gs://models/absent", "no model is there .no object begins with it"),
        ("gs://models/pickled", r"no safetensors.*pytorch_model\.bin"),
        ("gs://secret/model", "access is denied.*storage.objects.list.*Storage Object Viewer"),
        ("gs://", "gs://bucket/folder is wanted"),
        ("gs:///model", "gs://bucket/folder is wanted"),
        ("gs://models/../../etc", "gs://bucket/folder is wanted"),
    ],
)
def test_what_cannot_be_had(gcs: FakeGcs, tmp_path: Path, url: str, message: str) -> None:
    gcs.denied_buckets.add("secret")
    gcs.put("models", "pickled/config.json", b"{}")
    gcs.put("models", "pickled/pytorch_model.bin", b"")
    with pytest.raises(CheckpointError, match=f"{url}: .*{message}"):
        resolve(url, tmp_path)


def test_the_library_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.api_core", None)
    with pytest.raises(CheckpointError, match=r"gs://m/n: .*pip install 'hexserve\[gcs\]'"):
        resolve("gs://m/n", tmp_path)


def test_parts_of_a_url() -> None:
    assert split_url("gs://b") == ("b", "")
    assert split_url("gs://b/a/c/") == ("b", "a/c")
