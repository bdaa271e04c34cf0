"""The targets of the comparison with other servers, and whether measured figures keep them.

A target speaks about one round's figures, most often as the quotient of two; what it must keep is
the median over the rounds. Rounds compare neighbours in time, so that a machine whose speed
drifts does not decide.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.handoff import MEDIAN_FACTOR, P99_FACTOR
from benchmarks.peer_servers import (
    COLOCATED,
    DISAGG,
    HEXSERVE,
    INT8,
    LLAMA_Q8,
    VLLM,
    VLLM_256,
)
from benchmarks.stats import median, ratio
from benchmarks.workloads import Figures

SAMPLED = {COLOCATED: f"{COLOCATED}, sampled", DISAGG: f"{DISAGG}, sampled"}
MACHINE = "machine"

Round = Mapping[str, Figures]
"""One round of a workload: contender → its figures."""

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True)
class Quotient:
    """A contender's figure over that of others: the best of them, by `best`."""

    figure: str
    contender: str
    other_figure: str
    others: tuple[str, ...]
    best: Callable[..., float] = min

    @property
    def contenders(self) -> tuple[str, ...]:
        """Whose figures it needs."""
        return (self.contender, *self.others)

    def __call__(self, figures: Round) -> float | None:
        """None where one of the figures is missing."""
        others = [figures[name].get(self.other_figure) for name in self.others]
        present = [value for value in others if value is not None]
        if len(present) < len(others):
            return None
        return ratio(figures[self.contender].get(self.figure), self.best(present))


@dataclass(frozen=True, slots=True)
class Single:
    """A contender's figure as it is."""

    figure: str
    contender: str

    @property
    def contenders(self) -> tuple[str, ...]:
        """Whose figure it is."""
        return (self.contender,)

    def __call__(self, figures: Round) -> float | None:
        """None where it is missing."""
        return figures[self.contender].get(self.figure)


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound that a workload's rounds must keep.

    Attributes:
        over: of the rounds' values, the one that counts; the median unless told.
    """

    workload: str
    what: str
    value: Quotient | Single
    comparison: str
    bound: float
    over: Callable[[Sequence[float]], float | None] = median

    @property
    def name(self) -> str:
        return f"{self.workload}: {self.what} {self.comparison} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal and what was measured for it; `value` is None where a figure is missing."""

    goal: Goal
    value: float | None

    @property
    def kept(self) -> bool:
        """Whether the bound is kept. What was not measured is not."""
        compare = _COMPARE[self.goal.comparison]
        return self.value is not None and compare(self.value, self.goal.bound)


def _over(figure: str, contender: str, *others: str, best: Callable[..., float] = min) -> Quotient:
    return Quotient(figure, contender, figure, others, best)


GOALS = (
    Goal("w1", "TPOT, colocated / vLLM", _over("tpot_p50_ms", COLOCATED, VLLM), "<=", 1.0),
    Goal(
        "w1",
        "TPOT, colocated / reading weights and KV once",
        Quotient("tpot_p50_ms", COLOCATED, "read_all_ms", (MACHINE,)),
        "<=",
        1.25,
    ),
    Goal("w1", "TPOT, int8 / vLLM bf16", _over("tpot_p50_ms", INT8, VLLM), "<=", 0.65),
    Goal("w1", "TPOT, int8 / llama.cpp q8_0", _over("tpot_p50_ms", INT8, LLAMA_Q8), "<=", 1.0),
    Goal(
        "w1",
        "TPOT, 1,1 / reading them once on its own cores",
        Quotient("tpot_p50_ms", DISAGG, "read_half_ms", (MACHINE,)),
        "<=",
        1.25,
    ),
    Goal("w2", "tok/s, colocated / vLLM", _over("output_tok_s", COLOCATED, VLLM), ">=", 1.3),
    Goal("w2", "TTFT p50, colocated / vLLM", _over("ttft_p50_ms", COLOCATED, VLLM), "<=", 1.0),
    Goal("w2", "tok/s, 1,1 / vLLM", _over("output_tok_s", DISAGG, VLLM), ">=", 0.9),
    *(
        Goal(
            "w2",
            f"tok/s, {label}: sampled / greedy",
            _over("output_tok_s", sampled, label),
            ">=",
            0.9,
        )
        for label, sampled in SAMPLED.items()
    ),
    Goal("w3", "TTFT, colocated / vLLM", _over("ttft_p50_ms", COLOCATED, VLLM), "<=", 0.9),
    Goal(
        "w3",
        "FLOP/s, colocated / best matmul",
        Quotient("matmul_all_ms", MACHINE, "ttft_p50_ms", (COLOCATED,)),
        ">=",
        0.5,
    ),
    Goal(
        "w4",
        f"ITL p99, 1,1 / max({MEDIAN_FACTOR:g} quiet p50, {P99_FACTOR:g} quiet p99)",
        Quotient("itl_p99_ms", DISAGG, "itl_bound_ms", (DISAGG,)),
        "<=",
        1.0,
    ),
    Goal(
        "w4",
        "ITL p99, 1,1 / better vLLM",
        _over("itl_p99_ms", DISAGG, VLLM, VLLM_256),
        "<=",
        0.4,
    ),
    Goal(
        "w4",
        "streams' tok/s, 1,1 / better vLLM",
        _over("output_tok_s", DISAGG, VLLM, VLLM_256, best=max),
        ">",
        1.0,
    ),
    Goal("w4", "long prompts answered, 1,1", Single("long_answered", DISAGG), ">=", 10, min),
    Goal("w4", "TTFT p50 ms, 1,1", Single("ttft_p50_ms", DISAGG), "<=", 3000),
    *(
        Goal(workload, f"compiles after ready, {label}", Single("compiles", label), "<=", 0, max)
        for workload, labels in (
            ("w1", HEXSERVE),
            ("w2", (COLOCATED, DISAGG, *SAMPLED.values())),
            ("w3", (COLOCATED, DISAGG)),
            ("w4", (DISAGG,)),
        )
        for label in labels
    ),
)  # fmt: skip


def judge(rounds: Mapping[str, Sequence[Round]]) -> Iterator[Verdict]:
    """A verdict for every goal whose workload was run with all the contenders it needs."""
    for goal in GOALS:
        of_workload = rounds.get(goal.workload)
        if not of_workload or not _covers(of_workload, goal):
            continue
        values = [value for each in of_workload if (value := goal.value(each)) is not None]
        whole = len(values) == len(of_workload)
        yield Verdict(goal, goal.over(values) if whole else None)


def left_out(rounds: Mapping[str, Sequence[Round]]) -> list[Goal]:
    """The goals of those workloads that a contender was missing for."""
    return [
        goal
        for goal in GOALS
        if rounds.get(goal.workload) and not _covers(rounds[goal.workload], goal)
    ]


def stream_bound_ms(figures: Figures) -> float | None:
    """The most that the streams' ITL p99 may be, by their quiet figures of the same run."""
    middle, high = figures.get("itl_quiet_p50_ms"), figures.get("itl_quiet_p99_ms")
    if middle is None or high is None:
        return None
    return max(MEDIAN_FACTOR * middle, P99_FACTOR * high)


def _covers(rounds: Sequence[Round], goal: Goal) -> bool:
    return all(name in each for each in rounds for name in goal.value.contenders)
