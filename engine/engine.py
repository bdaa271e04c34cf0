"""The engine: commands in, one step after another, events out."""

from __future__ import annotations

import dataclasses
import queue
import time

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
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.types import Load


class Engine:
    """One model on one worker's devices.

    `submit` may be called from any thread; everything else belongs to the engine thread.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._step_began: float | None = None
        self._load = scheduler.load()

    def submit(self, command: Command) -> None:
        """Hand over a command; it takes effect before the next step."""
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
        """Schedule → run → commit: one forward pass and the copies around it."""
        self._step_began = time.monotonic()
        self._take_commands()
        plan = self._scheduler.schedule()
        outcome = self._runner.dispatch(plan)()
        events = self._scheduler.commit(plan, outcome)
        self._load = self._scheduler.load()
        self._step_began = None
        return StepResult(events, self._load)

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

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                self._execute(command)

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
