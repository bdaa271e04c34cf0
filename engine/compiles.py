"""Counts what XLA compiles, so that a program missing from the warm-up does not go unseen."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the process's compiles (cache loads included) since the last `reset`."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def reset(self) -> None:
        self.count = 0

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            self.count += 1
