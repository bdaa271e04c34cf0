"""Code built for one instruction set must not be linked into code that runs on any processor."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CMAKE = Path(__file__).parents[2] / "engine" / "kernels" / "cpu" / "cmake"
OBJECTS = {
    path.relative_to(CMAKE / "CMakeFiles").parts[0].removesuffix(".dir"): path
    for source in ("isa", "amx")
    for path in (CMAKE / "CMakeFiles").rglob(f"{source}.cc.o")
}
"""By the name of the instruction set."""


@pytest.mark.skipif(not OBJECTS or shutil.which("nm") is None, reason="no objects, or no nm")
@pytest.mark.parametrize("name", ["avx2", "avx512", "avx512bf16", "amx", "amx_emulated"])
def test_an_instruction_set_shares_no_function(name: str) -> None:
    """A weak symbol, such as an inline function of the standard library, could be merged; those
    of the instruction set's own namespace have no namesake."""
    if name == "amx" and name not in OBJECTS:
        pytest.skip("the compiler does not know AMX")
    command = ["nm", str(OBJECTS[name])]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-2:] for line in listing.splitlines()]
    assert symbols
    own = f"8hexserve{len(name)}{name}"
    assert [s for kind, s in symbols if kind in "WVwvu" and own not in s] == []


@pytest.mark.skipif(not OBJECTS or shutil.which("objdump") is None, reason="no objects or objdump")
@pytest.mark.parametrize("name", ["avx2", "avx512", "avx512bf16"])
@pytest.mark.parametrize("loop", ["pack_keys", "attend", "fetch", "add_depth", "multiply_panels"])
def test_loops_over_memory_prefetch(name: str, loop: str) -> None:
    """Compilers drop what seems to do nothing, and all tests of results would still pass."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(OBJECTS[name])]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = [part for part in listing.split("\n\n") if loop in part.partition("\n")[0]]
    assert functions
    assert any("prefetcht" in part for part in functions)
