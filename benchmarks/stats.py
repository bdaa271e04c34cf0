"""Small statistics and host facts that every benchmark reports the same way."""

import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile by nearest rank, None for no values.

    Nearest rank always answers with a value that was measured; with few values
    a high percentile is their maximum.
    """
    if not 0 <= q <= 100:
        raise ValueError(f"percentile must lie in 0..100, got {q}")
    if not values:
        return None
    rank = math.ceil(len(values) * q / 100)
    return sorted(values)[max(rank, 1) - 1]


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are there, None where there are none."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient, None where either side is missing or the denominator is 0."""
    if numerator is None or not denominator:
        return None
    return numerator / denominator


def milliseconds(seconds: float | None) -> float | None:
    """Seconds as milliseconds; None stays None."""
    return None if seconds is None else 1000 * seconds


def host_info() -> dict[str, str | int | None]:
    """What the client's machine is, for reading old result files.

    `cores` counts the machine's, `usable_cores` those this process may run on.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cores": os.cpu_count(),
        "usable_cores": len(affinity(0)) if affinity else os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }
