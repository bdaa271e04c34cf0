"""Targets for figures, written as `w2.output_tok_s>=1.3`.

With one server a target speaks about the figure itself, with two about the ratio
of the first server's to the second's.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.workloads import Figures

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_PATTERN = re.compile(r"\s*(\w+)\.(\w+)\s*(>=|<=|>|<)\s*([0-9.]+(?:e[+-]?\d+)?)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that one figure of one workload must keep."""

    workload: str
    figure: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read `WORKLOAD.FIGURE` followed by `>=`, `<=`, `>` or `<` and a number."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"target {text!r} is not like 'w2.output_tok_s>=1.3'")
        workload, figure, comparison, bound = match.groups()
        try:
            return cls(workload, figure, comparison, float(bound))
        except ValueError:
            raise ValueError(f"target {text!r}: {bound!r} is not a number") from None

    def __str__(self) -> str:
        return f"{self.workload}.{self.figure}{self.comparison}{self.bound:g}"

    def missed(self, figures: Mapping[str, Figures]) -> str | None:
        """Why the figures, by workload, miss this target; None when they keep it."""
        value = figures.get(self.workload, {}).get(self.figure)
        if value is None:
            return f"{self}: not measured"
        if not _COMPARE[self.comparison](value, self.bound):
            return f"{self}: is {value:.4g}"
        return None
