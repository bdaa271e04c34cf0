"""How the layers of a model are scanned: over units of a few layers that repeat."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models.traits import LayerKind


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers first, first + 1, …: the unit `kinds`, `repeats` times over."""

    first: int
    kinds: tuple[LayerKind, ...]
    repeats: int


def segments_of(kinds: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
    """Cut the layers into segments whose units have the fewest layers together.

    A unit's layers are compiled one by one: their number is what a program costs to compile.
    """
    count = len(kinds)
    best: list[tuple[int, tuple[Segment, ...]]] = [(0, ())] * (count + 1)
    for first in reversed(range(count)):
        ways = []
        for length in range(1, count - first + 1):
            repeats = _repeats(kinds, first, length)
            cost, rest = best[first + length * repeats]
            unit = kinds[first : first + length]
            ways.append((cost + length, (Segment(first, unit, repeats), *rest)))
        best[first] = min(ways, key=lambda way: (way[0], len(way[1])))
    return best[0][1]


def _repeats(kinds: tuple[LayerKind, ...], first: int, length: int) -> int:
    """How often the `length` layers from `first` on follow each other."""
    unit, repeats = kinds[first : first + length], 1
    while kinds[first + repeats * length : first + (repeats + 1) * length] == unit:
        repeats += 1
    return repeats
