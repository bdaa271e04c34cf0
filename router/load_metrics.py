"""The load of the workers together, for Prometheus, summed up when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from router.load import PoolLoad


class LoadCollector(Collector):
    """Exports `load()`, and as waiting also the `waiting_here()` that no worker has yet."""

    def __init__(
        self,
        load: Callable[[], PoolLoad],
        waiting_here: Callable[[], int],
        labels: Mapping[str, str],
    ) -> None:
        self._load = load
        self._waiting_here = waiting_here
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        for name, text, value in (
            ("vllm:num_requests_running", "Requests being computed.", load.running),
            (
                "vllm:num_requests_waiting",
                "Requests waiting in router and workers.",
                load.waiting + self._waiting_here(),
            ),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the KV blocks in use; 1 is all of them.",
                load.kv_cache_usage,
            ),
            (
                "hexserve:compiles_after_ready",
                "Programs compiled after the workers' warm-up.",
                load.compiles,
            ),
            (
                "hexserve:kv_blocks_unaccounted",
                "KV blocks less those of hexserve:kv_blocks; 0 in sound workers.",
                load.unaccounted_blocks,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=list(self._labels))
            gauge.add_metric(list(self._labels.values()), value)
            yield gauge
        blocks = GaugeMetricFamily(
            "hexserve:kv_blocks",
            "KV blocks of the workers together, by what holds them.",
            labels=[*self._labels, "state"],
        )
        for state, count in (
            ("free", load.free_blocks),
            ("cached", load.cached_blocks),
            ("running", load.running_blocks),
            ("exported", load.exported_blocks),
        ):
            blocks.add_metric([*self._labels.values(), state], count)
        yield blocks
