"""The engine: commands in, one step after another, events out."""

from __future__ import annotations

import dataclasses
import os
import queue
import time
from collections.abc import Callable

from engine.events import (
    Abort,
    Add,
    BeginDecode,
    Command,
    ReadKV,
    ReleaseExport,
    StepResult,
    WriteKV,
)
from engine.pace import Pace
from engine.plan import StepOutcome
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.types import Load

TOKENS_PER_STEP = 2**16
"""Tokens of new sequences that are taken in while a step is due: each is looked at."""
COMMAND_TOKENS = 128
"""What a command counts as beside them."""


class Engine:
    """One model on one worker's devices.

    `submit` may be called from any thread; everything else belongs to the engine thread.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, pace: Pace | None = None) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._pace = pace or Pace(ahead=len(os.sched_getaffinity(0)) > 1)
        self._running: Callable[[], StepOutcome] | None = None
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._step_began: float | None = None
        self._load = scheduler.load()

    def submit(self, command: Command) -> None:
        """Hand over a command; it takes effect before the next step, or, if many come at once,
        before one of the next."""
        self._commands.put(command)

    def wake(self) -> None:
        """Let `wait_for_work` return."""
        self._commands.put(None)

    def wait_for_work(self) -> None:
        """Block until a step would do something, or `wake` is called."""
        if not self._scheduler.has_work:
            command = self._commands.get()
            if command is not None:
                self._execute(command)

    def step(self) -> StepResult:
        """Dispatch the next step, then wait for the one before it and commit that.

        A step is one forward pass and the copies around it: schedule → dispatch → commit. The
        next is dispatched while one runs, unless nobody can tell when that will end.
        """
        running, self._running = self._running, None
        if running is None:
            self._step_began = time.monotonic()
        if self._wait_until_due():
            plan = self._scheduler.schedule()
            if plan.entries:
                self._running = self._runner.dispatch(plan)
                self._pace.dispatched(plan)
        if running is not None:
            outcome = running()
            self._pace.ended()
            self._scheduler.commit(outcome)
        self._step_began = self._pace.began
        self._load = self._scheduler.load()
        return StepResult(self._scheduler.take_events(), self._load)

    def load(self) -> Load:
        """The load after the last step, with the age of the running one; any thread."""
        began = self._step_began
        age = 0.0 if began is None else time.monotonic() - began
        return dataclasses.replace(
            self._load, step_age_s=age, compiles=self._runner.compiles_after_warm_up
        )

    def check_invariants(self) -> None:
        """See Scheduler.check_invariants; between steps only."""
        self._scheduler.check_invariants()

    def _wait_until_due(self) -> bool:
        """Take commands until the next step is due; False: only once the running has ended.

        Then those that are there are taken as well, but not so many that they hold the step up.
        """
        taken = 0
        while (left := self._pace.wait_s()) is not None:
            if taken >= TOKENS_PER_STEP:
                return True
            try:
                command = self._commands.get(block=left > 0, timeout=max(left, 0.0))
            except queue.Empty:
                if left <= 0:
                    return True
                continue
            if command is not None:
                self._execute(command)
                taken += _tokens_of(command) if left <= 0 else 0
        return False

    def _execute(self, command: Command) -> None:
        scheduler = self._scheduler
        match command:
            case Add(request):
                scheduler.add(request)
            case Abort(attempt):
                scheduler.abort(attempt)
            case ReadKV():
                scheduler.read(command)
            case ReleaseExport(transfer_id):
                scheduler.release_export(transfer_id)
            case WriteKV():
                scheduler.write(command)
            case BeginDecode():
                scheduler.begin_decode(command)


def _tokens_of(command: Command) -> int:
    if not isinstance(command, Add):
        return COMMAND_TOKENS
    return COMMAND_TOKENS + len(command.request.prompt) + len(command.request.output)
