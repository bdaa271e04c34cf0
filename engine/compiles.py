"""Counts what XLA compiles, so that a program missing from the warm-up does not go unseen."""

from __future__ import annotations

import threading

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the compiles (cache loads included) of the watched thread since the last `reset`.

    Other engines of the process may be compiling meanwhile, in other threads.
    """

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def reset(self) -> None:
        self.count = 0

    def watch_this_thread(self) -> None:
        """From now on the calling thread is the one that is watched."""
        self._thread = threading.get_ident()

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT and threading.get_ident() == self._thread:
            self.count += 1
