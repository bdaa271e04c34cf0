"""What workers have found in their prefix caches, and what the router knows of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.types import Load
from router.cached_prefixes import CachedPrefixes


class PrefixTotals:
    """Sums that never go back, whichever worker ends or begins anew.

    A worker counts from the start of its epoch; only what is more than it told before is added.
    """

    def __init__(self) -> None:
        self.queries = 0
        self.hits = 0
        self._told: dict[str, tuple[int, int, int]] = {}  # address → epoch, queries, hits

    def take(self, address: str, epoch: int, load: Load) -> None:
        """A worker's counters; `epoch` is new for every process at that address."""
        known_epoch, queries, hits = self._told.get(address, (epoch, 0, 0))
        if known_epoch != epoch:
            queries = hits = 0
        self._told[address] = (epoch, load.prefix_queries, load.prefix_hits)
        self.queries += max(0, load.prefix_queries - queries)
        self.hits += max(0, load.prefix_hits - hits)


class PrefixCollector(Collector):
    """Exports the totals under the names that other tools read."""

    def __init__(self, totals: PrefixTotals, labels: Mapping[str, str]) -> None:
        self._totals = totals
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for name, text, value in (
            ("queries", "Tokens of prompts that were looked up.", self._totals.queries),
            ("hits", "Of those, tokens that were found.", self._totals.hits),
        ):
            family = CounterMetricFamily(
                f"vllm:prefix_cache_{name}", text, labels=list(self._labels)
            )
            family.add_metric(list(self._labels.values()), value)
            yield family


class PrefixIndexCollector(Collector):
    """Exports the router's index of cached blocks, and what its choices have found in it."""

    def __init__(self, prefixes: CachedPrefixes, labels: Mapping[str, str]) -> None:
        self._prefixes = prefixes
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        names, values, prefixes = list(self._labels), list(self._labels.values()), self._prefixes
        resyncs = CounterMetricFamily(
            "hexserve:prefix_index_resyncs",
            "Workers that contradicted the index, and told all of their blocks again.",
            labels=names,
        )
        resyncs.add_metric(values, prefixes.resyncs)
        yield resyncs
        blocks = GaugeMetricFamily(
            "hexserve:prefix_index_blocks", "Cached blocks that the index knows.", labels=names
        )
        blocks.add_metric(values, len(prefixes.index))
        yield blocks
        for name, text, counts in (
            ("asked", "Tokens of prompts, by where they were sent.", prefixes.asked_tokens),
            ("hit", "Of those, tokens that the index found there.", prefixes.hit_tokens),
        ):
            family = CounterMetricFamily(
                f"hexserve:routed_{name}_tokens", text, labels=[*names, "place"]
            )
            for place, count in counts.items():
                family.add_metric([*values, place], count)
            yield family
