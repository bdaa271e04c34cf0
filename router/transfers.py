"""The KV transfers of all workers together, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from protos.transfer_codec import TransferCounts, Transfers

COUNTERS = {
    "transfers": ("completed", "Transfers that ended well."),
    "bytes": ("bytes", "KV that travelled, without padding."),
    "chunks": ("chunks", "Chunks that travelled."),
    "seconds": ("seconds", "From a reader's pull to the transfer's end."),
    "overlap_bytes": ("overlap_bytes", "KV sent while the prefill was still computing."),
    "overlap_seconds": ("overlap_seconds", "Seconds in which the prefill was still computing."),
    "skipped_tokens": ("skipped_tokens", "Tokens whose KV the reader had already."),
    "fallbacks": ("fallbacks", "Readers that went on to another endpoint."),
}
"""Field of TransferCounts → its metric's name and meaning."""
GAUGES = {
    "waiting": ("waiting", "Transfers whose reader has no room yet."),
    "reads": ("reads", "Chunks asked of the prefill engine and not sent yet."),
}


class TransferTotals:
    """Sums that never go back, whichever worker ends or begins anew.

    Each worker tells what it has counted since its start, its epoch's. Only what is more than
    it told before is added: nothing is counted twice, and of a worker that dies only what it
    had counted since its last message is lost. A router that has just begun takes over what its
    workers have counted so far.
    """

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, Transfers]] = {}  # address → epoch, what it told last
        self._sums: dict[tuple[str, str], TransferCounts] = {}

    def take(self, address: str, epoch: int, transfers: Transfers) -> None:
        """A worker's counters; `epoch` is new for every process at that address."""
        known_epoch, known = self._told.get(address, (epoch, {}))
        self._told[address] = (epoch, transfers)
        for (role, transport), counts in transfers.items():
            before = known.get((role, transport)) if known_epoch == epoch else None
            key = transport, str(role)
            _add(self._sums.setdefault(key, TransferCounts()), counts, before or TransferCounts())

    def gone(self, address: str) -> None:
        """Nothing is under way there; what was counted stays."""
        epoch, transfers = self._told.get(address, (0, {}))
        idle = {key: replace(counts, waiting=0, reads=0) for key, counts in transfers.items()}
        self._told[address] = (epoch, idle)

    def sums(self) -> Mapping[tuple[str, str], TransferCounts]:
        """(transport, role) → counters of all workers."""
        for key, total in self._sums.items():
            for name in GAUGES:
                setattr(total, name, sum(getattr(each, name) for each in self._now(*key)))
        return self._sums

    def _now(self, transport: str, role: str) -> Iterator[TransferCounts]:
        for _, transfers in self._told.values():
            for (told_role, told_transport), counts in transfers.items():
                if (told_transport, str(told_role)) == (transport, role):
                    yield counts


def _add(total: TransferCounts, counts: TransferCounts, before: TransferCounts) -> None:
    for name in COUNTERS:
        grown = max(0, getattr(counts, name) - getattr(before, name))
        setattr(total, name, getattr(total, name) + grown)
    for cause, count in counts.failures.items():
        grown = max(0, count - before.failures.get(cause, 0))
        total.failures[cause] = total.failures.get(cause, 0) + grown


class TransferCollector(Collector):
    """Exports totals as `hexserve:kv_transfer_*` with labels transport and role."""

    def __init__(self, totals: TransferTotals, labels: Mapping[str, str]) -> None:
        self._totals = totals
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        sums = self._totals.sums()
        names = [*self._labels, "transport", "role"]
        for kind, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for field, (name, text) in table.items():
                family = kind(f"hexserve:kv_transfer_{name}", text, labels=names)
                for key, counts in sums.items():
                    family.add_metric([*self._labels.values(), *key], getattr(counts, field))
                yield family
        failures = CounterMetricFamily(
            "hexserve:kv_transfer_failures",
            "Transfers that did not end well, by cause.",
            labels=[*names, "cause"],
        )
        for key, counts in sums.items():
            for cause, count in sorted(counts.failures.items()):
                failures.add_metric([*self._labels.values(), *key, cause], count)
        yield failures
