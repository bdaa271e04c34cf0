"""What a chaos run has shown: its figures, and what is not forgiven."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos_faults import DoneFault
from benchmarks.chaos_requests import Tally
from benchmarks.stats import percentile

MOST_GROWTH = 0.03
"""Of a process's memory in the second half of a run of aborts."""


@dataclass(slots=True)
class Outcome:
    """What a run has shown. Times in seconds.

    `memory` is, per process, its bytes in use at regular moments of a run of aborts, of which
    `aborted` counts by phase.
    """

    tally: Tally = field(default_factory=Tally)
    faults: list[DoneFault] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=dict)
    aborted: Counter[str] = field(default_factory=Counter)

    @property
    def gaps(self) -> list[float]:
        """Of each stream that a fault fell into: from its event before it to that after it."""
        gaps = (a.gap_around(f.at) for f in self.faults for a in self.tally.answers)
        return [gap for gap in gaps if gap is not None]

    @property
    def growth(self) -> dict[str, float]:
        """Per process: how much more it had at most in the last quarter than in the third."""
        shares = {}
        for name, samples in self.memory.items():
            half = samples[len(samples) // 2 :]
            middle = len(half) // 2
            shares[name] = max(half[middle:]) / max(half[:middle]) - 1 if middle else 0.0
        return shares

    def figures(self) -> dict[str, Any]:
        """Everything as numbers and short texts."""
        found = {
            "requests": len(self.tally.answers),
            "refused": self.tally.refused,
            "client_errors": self.tally.errors,
            "mismatches": self.tally.mismatches,
            "leaks": self.leaks,
            "faults": dict(Counter(f.fault.value for f in self.faults)),
            "points": dict(Counter(f.point for f in self.faults if f.met)),
            "recovery_p50_s": percentile(self.recoveries, 50),
            "recovery_p99_s": percentile(self.recoveries, 99),
            "gap_p50_s": percentile(self.gaps, 50),
            "gap_p99_s": percentile(self.gaps, 99),
        }
        if self.memory:
            found["aborted"] = dict(self.aborted)
            found["memory_growth"] = {name: round(g, 4) for name, g in self.growth.items()}
            found["memory_mib"] = {
                name: round(samples[-1] / 2**20, 1) for name, samples in self.memory.items()
            }
        return found

    def failures(self) -> list[str]:
        """What --check does not forgive."""
        tally = self.tally
        counted = ((tally.errors, "client errors"), (tally.mismatches, "other answers"))
        found = [f"{len(each)} {what}, such as {each[0]}" for each, what in counted if each]
        found += self.leaks
        found += [
            f"the memory of {name} has grown by {share:.1%} in the second half"
            for name, share in self.growth.items()
            if share > MOST_GROWTH
        ]
        return found if self.faults or self.memory else [*found, "no fault was done"]
