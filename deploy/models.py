"""`hexserve models`: which models are served, from the table that the engine goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListedFamily:
    """The names that config.json may give a family as model_type, and what people call it."""

    model_types: tuple[str, ...]
    models: str
    features: str


def families() -> list[ListedFamily]:
    """All families, by their first model_type."""
    from engine.models.families import FAMILIES

    names: dict[tuple[str, str], list[str]] = {}
    for model_type, family in sorted(FAMILIES.items()):
        names.setdefault((family.models, family.features), []).append(model_type)
    return [ListedFamily(tuple(types), *texts) for texts, types in names.items()]


def plain_list(listed: Sequence[ListedFamily]) -> str:
    """A few lines for each family, for a terminal."""
    return "\n".join(
        f"{', '.join(family.model_types)}\n  {family.models}\n  {family.features}".rstrip()
        for family in listed
    )


def markdown_table(listed: Sequence[ListedFamily]) -> str:
    """The table in README.md."""
    lines = ["| `model_type` | models | what its decoder has |", "|---|---|---|"]
    for family in listed:
        names = ", ".join(f"`{name}`" for name in family.model_types)
        lines.append(f"| {names} | {family.models} | {family.features} |")
    return "\n".join(lines)
