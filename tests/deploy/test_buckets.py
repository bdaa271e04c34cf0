"""A model in a bucket, as Vertex AI names it, served from there."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.fake_gcs import FakeGcs, serving
from tests.deploy.conftest import Launch
from tests.deploy.launch import HEXSERVE, complete, expected_tokens

URL = "gs://models/fake"


def test_the_model_is_fetched_once_and_served(
    launch: Launch, fake_folder: Path, cache: Path
) -> None:
    gcs = FakeGcs()
    for path in fake_folder.iterdir():
        gcs.put("models", f"fake/{path.name}", path.read_bytes())
    with serving(gcs) as emulator:
        for _ in range(2):
            server = launch(
                *HEXSERVE, "serve", "--port=0", "--disagg_topo=1,1", "--load_format=dummy",
                "--host=127.0.0.1", AIP_STORAGE_URI=URL, STORAGE_EMULATOR_HOST=emulator,
            )  # fmt: skip
            url = server.ready_url()
            assert complete(url, [1, 2, 3], 8) == expected_tokens([1, 2, 3], 8)
            server.end()
    assert sorted(name for name, _ in gcs.fetched) == sorted(name for _, name in gcs.objects)
    assert (cache / "gcs" / "models" / "fake" / "config.json").is_file()
