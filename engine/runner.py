"""What the engine asks of the devices: execute a step plan."""

from __future__ import annotations

from typing import Protocol

from engine.plan import StepOutcome, StepPlan


class Runner(Protocol):
    """Executes plans, in order, on one engine's devices. Used by the engine thread alone."""

    def warm_up(self) -> None:
        """Compile every program, so that no request waits for a compiler."""

    @property
    def compiles_after_warm_up(self) -> int:
        """Programs compiled since `warm_up`; above 0, some request has waited for a compiler."""

    def run(self, plan: StepPlan) -> StepOutcome:
        """Execute `plan` and wait for what it samples and exports to the host.

        Mutates the KV pool and the penalty counts. Numpy arrays of the plan's imports are not
        read after this returns; arrays of the outcome own their memory.
        """
