"""The queue of sequences that have no room yet. Plain Python, no jax."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

from engine.sequence import Sequence

_Place = tuple[int, bool, int]


class WaitingQueue:
    """By priority, lower first; then those whose stream has begun, then first come first.

    What has begun comes from a worker that it has lost its place at, and a client reads it.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._places: list[_Place] = []
        self._sequences: dict[_Place, Sequence] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return (self._sequences[place] for place in self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def first(self) -> Sequence:
        """Raises IndexError when there is none."""
        return self._sequences[self._places[0]]

    def append(self, sequence: Sequence) -> None:
        """At its place, behind its equals."""
        request = sequence.request
        place = (request.priority, not request.output, next(self._numbers))
        bisect.insort(self._places, place)
        self._sequences[place] = sequence

    def popleft(self) -> Sequence:
        """Take the first.

        Raises:
            IndexError: there is none.
        """
        return self._sequences.pop(self._places.pop(0))

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError when it is not here."""
        for place, each in self._sequences.items():
            if each is sequence:
                del self._sequences[place]
                self._places.remove(place)
                return
        raise ValueError(f"{sequence.id} does not wait")
