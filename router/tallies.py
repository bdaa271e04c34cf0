"""Counters and histograms that cost next to nothing per token.

prometheus_client's own take a lock and look through the buckets at every call. These belong to
one event loop, on which they are also rendered, and become Prometheus's at that time only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter; add to `count`."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str]) -> None:
        self.count = 0
        self._name, self._text, self._labels = name, text, labels

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.count)
        yield family


class HistogramTally(Collector):
    """A histogram; `buckets` are upper ends in ascending order, without infinity."""

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._ends = tuple(buckets)
        self._counts = [0] * (len(self._ends) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, as often as it was seen."""
        self._counts[bisect_left(self._ends, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        buckets: list[tuple[str, float]] = []
        total = 0
        for end, count in zip((*self._ends, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(end), total))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
