"""Code built for one instruction set must not be linked into code that runs on any processor."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CMAKE = Path(__file__).parents[2] / "engine" / "kernels" / "cpu" / "cmake"
OBJECTS = list(CMAKE.rglob("isa.cc.o"))


@pytest.mark.skipif(not OBJECTS or shutil.which("nm") is None, reason="no objects, or no nm")
@pytest.mark.parametrize("name", ["avx2", "avx512", "avx512bf16"])
def test_an_instruction_set_shares_no_function(name: str) -> None:
    """A weak symbol, such as an inline function of the standard library, could be merged; those
    of the instruction set's own namespace have no namesake."""
    (path,) = [path for path in OBJECTS if f"{name}.dir" in path.parts]
    listing = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-2:] for line in listing.splitlines()]
    assert symbols
    own = f"8hexserve{len(name)}{name}"
    assert [s for kind, s in symbols if kind in "WVwvu" and own not in s] == []
