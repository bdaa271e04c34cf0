"""`hexserve models` and the table in README.md come from one source."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli import main
from deploy.models import ListedFamily, families, markdown_table, plain_list
from engine.models.families import FAMILIES

README = Path(__file__).parents[2] / "README.md"
TWO = (ListedFamily(("a", "a_text"), "A 1B", "windows"), ListedFamily(("b",), "B", ""))


def test_every_family_is_listed_once() -> None:
    listed = [name for family in families() for name in family.model_types]
    assert sorted(listed) == sorted(FAMILIES)


def test_the_readme_has_the_same_table() -> None:
    """After a change of the families: put the output of `hexserve models --markdown` there."""
    assert markdown_table(families()) in README.read_text()


def test_how_families_look() -> None:
    assert plain_list(TWO) == "a, a_text\n  A 1B\n  windows\nb\n  B"
    assert markdown_table(TWO).splitlines()[2:] == [
        "| `a`, `a_text` | A 1B | windows |",
        "| `b` | B |  |",
    ]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["models"])
    assert "llama\n  Llama 2, 3" in capsys.readouterr().out
    main(["models", "--markdown"])
    assert capsys.readouterr().out.strip() == markdown_table(families())
    with pytest.raises(SystemExit, match="2"):
        main(["models", "--all"])
    assert "models: only --markdown is taken, not --all" in capsys.readouterr().err
