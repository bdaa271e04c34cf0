"""The tests that docs/faults.md names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`(tests/\S+\.py)::(test_\w+)`")


def test_every_test_that_is_named_for_a_fault_exists() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "faults.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| fault")
    ]
    assert rows
    for row in rows:
        named = NAMED.findall(row)
        assert named, f"no test is named: {row}"
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text())
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            found = {node.name for node in tree.body if isinstance(node, functions)}
            assert name in found, f"{file} has no {name}"
