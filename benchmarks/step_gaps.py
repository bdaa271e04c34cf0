"""The time between an engine's steps in which nothing is computed, seen by jax's profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

_DEVICE_THREADS = "tf_XLA"
_PROGRAM = "hlo_module"
"""What the profiler calls a CPU device's threads, and the program that an event is part of."""


def gaps(step: Callable[[], object], steps: int) -> list[float]:
    """Run `step` `steps` times: the seconds between the end of one batch's programs and the
    beginning of the next one's.

    A batch is two programs, the forward pass and then sampling.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow down what is measured
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                step()
        return _between_batches(_kernels(Path(folder)))


def _kernels(folder: Path) -> list[tuple[float, float, str]]:
    """(begin, end, program) of all that the devices computed, in seconds, by their begin."""
    (trace,) = folder.rglob("*.xplane.pb")
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            if not line.name.startswith(_DEVICE_THREADS):
                continue
            for event in line.events:
                program = dict(event.stats).get(_PROGRAM)
                if program is not None:
                    end = event.start_ns + event.duration_ns
                    found.append((event.start_ns / 1e9, end / 1e9, str(program)))
    return sorted(found)


def _between_batches(kernels: list[tuple[float, float, str]]) -> list[float]:
    found = []
    ended, last = 0.0, ""
    for begin, end, program in kernels:
        if last.endswith("sample_rows") and program != last:
            found.append(max(0.0, begin - ended))
        ended, last = max(ended, end), program
    return found
