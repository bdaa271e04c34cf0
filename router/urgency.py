"""How urgent a request is: its priority, and until when it is wanted at all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.errors import DeadlinePassed
from router.fields import Fields

MOST_PRIORITY = 2**31 - 1
MOST_DEADLINE_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Urgency:
    """`priority`: a lower one goes first. `deadline`: on the loop's clock, in seconds, or None.

    A request whose deadline has passed is given up, wherever it is by then.
    """

    priority: int = 0
    deadline: float | None = None

    def check(self) -> None:
        """Raise DeadlinePassed when it has."""
        if self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline:
            raise DeadlinePassed

    def before(self, moment: float) -> float:
        """`moment`, or the deadline if that comes before it."""
        return moment if self.deadline is None else min(moment, self.deadline)


@dataclass(frozen=True, slots=True)
class AskedUrgency:
    """As a request's body says it: `deadline_ms` counts from the request's arrival."""

    priority: int = 0
    deadline_ms: int | None = None

    @classmethod
    def read(cls, fields: Fields) -> AskedUrgency:
        """From a request's body.

        Raises:
            BadRequest: a field is no integer, or out of range.
        """
        return cls(
            fields.integer("priority", 0, low=-MOST_PRIORITY - 1, high=MOST_PRIORITY),
            fields.optional_integer("deadline_ms", low=1, high=MOST_DEADLINE_MS),
        )

    def of_age(self, age_s: float) -> Urgency:
        """For a request that arrived `age_s` seconds ago."""
        if self.deadline_ms is None:
            return Urgency(self.priority)
        now = asyncio.get_running_loop().time()
        return Urgency(self.priority, now - age_s + self.deadline_ms / 1000)
