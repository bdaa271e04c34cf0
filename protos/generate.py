"""Regenerate the protobuf code: `python -m protos.generate` (needs grpcio-tools)."""

from __future__ import annotations

import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent


def generate(out: pathlib.Path) -> None:
    """Write `protos/worker_pb2.py` and `.pyi` for worker.proto under `out`.

    Raises:
        RuntimeError: protoc refused the file.
    """
    from grpc_tools import protoc

    root = FOLDER.parent
    arguments = ["protoc", f"-I{root}", f"--python_out={out}", f"--pyi_out={out}"]
    if protoc.main([*arguments, str(FOLDER / "worker.proto")]) != 0:
        raise RuntimeError("protoc failed; its messages are above")


if __name__ == "__main__":
    generate(FOLDER.parent)
    sys.exit(0)
