"""The generated code in the repository is that of the .proto file."""

from __future__ import annotations

import pathlib
import re

import pytest

from protos import worker_pb2
from protos.generate import FOLDER, generate

pytest.importorskip("grpc_tools")


def embedded(source: str) -> bytes:
    """The serialized descriptor that a generated module holds."""
    (literal,) = re.findall(r"AddSerializedFile\((b'.*')\)", source)
    return eval(literal)


def without_versions(source: str) -> str:
    """Generated stubs differ in their headers from version to version of protoc."""
    return "\n".join(line for line in source.splitlines() if not line.startswith(("#", "from")))


def test_the_descriptor_is_up_to_date(tmp_path: pathlib.Path) -> None:
    generate(tmp_path)
    fresh = embedded((tmp_path / "protos" / "worker_pb2.py").read_text())
    assert embedded((FOLDER / "worker_pb2.py").read_text()) == fresh
    assert worker_pb2.DESCRIPTOR.serialized_pb == fresh


def test_the_stub_names_the_same_fields(tmp_path: pathlib.Path) -> None:
    generate(tmp_path)
    fresh = (tmp_path / "protos" / "worker_pb2.pyi").read_text()
    assert without_versions((FOLDER / "worker_pb2.pyi").read_text()) == without_versions(fresh)
