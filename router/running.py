"""How many requests are with the generator."""

from __future__ import annotations

from collections import Counter

from router.record import RequestRecord


class RunningRequests:
    """Counts requests that have sequences under way; one that has several counts once."""

    def __init__(self) -> None:
        self._sequences = Counter[int]()  # id of a record, which its sequences keep alive

    def begin(self, record: RequestRecord) -> None:
        """A sequence of the request begins."""
        self._sequences[id(record)] += 1

    def end(self, record: RequestRecord) -> None:
        """It has ended. Once."""
        self._sequences[id(record)] -= 1
        if not self._sequences[id(record)]:
            del self._sequences[id(record)]

    def __len__(self) -> int:
        return len(self._sequences)
