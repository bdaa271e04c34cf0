"""What the native module is built from: jaxlib's headers and our sources. Run by CMake.

Prints jaxlib's version, the folder of its headers, and two hashes, separated by semicolons.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"


def jaxlib_headers() -> Path:
    """The folder of the headers that come with jaxlib; jaxlib itself is not loaded."""
    spec = importlib.util.find_spec("jaxlib")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "include"


def headers_hash() -> str:
    """Names the interface to XLA that this jaxlib's headers declare."""
    return _hash(sorted(jaxlib_headers().rglob("xla/ffi/**/*.h")))


def sources_hash() -> str | None:
    """Names the state of our sources; None where they are not there, as in a wheel."""
    return _hash(sorted(SOURCES.iterdir())) if SOURCES.is_dir() else None


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    version = importlib.metadata.version("jaxlib")
    print(version, jaxlib_headers(), headers_hash(), sources_hash(), sep=";", end="")
