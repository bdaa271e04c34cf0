"""Model folders for the tests of checkpoint/."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpoint.demo import fetch_demo_model
from checkpoint.fake import write_fake_model


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model, in the cache that the command line uses."""
    cache = os.environ.get("HEXSERVE_CACHE")
    return fetch_demo_model(Path(cache) if cache else Path.home() / ".cache" / "hexserve")


@pytest.fixture(scope="session")
def fake_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("fake"))
