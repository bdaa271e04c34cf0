"""The listed workers' states, restarts, preemptions and dropped messages, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.workers import STATES, WorkerPool


class WorkerCollector(Collector):
    """Exports what the pool knows, as it is then."""

    def __init__(self, pool: WorkerPool, labels: Mapping[str, str]) -> None:
        self._pool = pool
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        workers = GaugeMetricFamily(
            "hexserve:workers", "Listed workers, by state.", labels=[*self._labels, "state"]
        )
        counts = self._pool.states()
        for state in STATES:
            workers.add_metric([*self._labels.values(), state], counts.get(state, 0))
        yield workers
        restarts = CounterMetricFamily(
            "hexserve:worker_restarts",
            "Worker processes that the launcher has started again.",
            labels=list(self._labels),
        )
        restarts.add_metric(list(self._labels.values()), self._pool.restarts())
        yield restarts
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions",
            "Sequences put off because older ones needed their KV blocks.",
            labels=list(self._labels),
        )
        preemptions.add_metric(list(self._labels.values()), self._pool.preemptions)
        yield preemptions
        dropped = CounterMetricFamily(
            "hexserve:dropped_messages",
            "Messages of sessions that were dropped: tokens of ended attempts (late), what was no "
            "message (garbled), and what workers had no use for (by_worker).",
            labels=[*self._labels, "kind"],
        )
        for kind, count in self._pool.dropped().items():
            dropped.add_metric([*self._labels.values(), kind], count)
        yield dropped
