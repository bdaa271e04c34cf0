"""What the engine asks of the devices: execute a step plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.plan import StepOutcome, StepPlan


class Runner(Protocol):
    """Executes plans, in order, on one engine's devices. Used by the engine thread alone."""

    def warm_up(self) -> None:
        """Compile every program, so that no request waits for a compiler."""

    @property
    def compiles_after_warm_up(self) -> int:
        """Programs compiled since `warm_up`; above 0, some request has waited for a compiler."""

    def dispatch(self, plan: StepPlan) -> Callable[[], StepOutcome]:
        """Let the devices execute `plan` after those before it; returns before they have.

        Mutates the KV pool and what each slot has on the devices.

        Returns:
            what waits for all that the plan samples and exports to the host; to be called
            once, in the order of the plans. Numpy arrays of the plan's imports are read until
            it returns, and not after; arrays of the outcome own their memory.
        """
