"""Sums of what workers count of KV transfers: never back, whoever restarts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.types import Role
from protos.transfer_codec import TransferCounts
from router.metrics import RouterMetrics
from router.transfers import TransferTotals

SENT = Role.PREFILL, "shm"
TAKEN = Role.DECODE, "shm"


def only(totals: TransferTotals) -> TransferCounts:
    (counts,) = totals.sums().values()
    return counts


def test_growth_is_added_and_a_new_epoch_begins_at_nothing() -> None:
    totals = TransferTotals()
    totals.take("a", 1, {SENT: TransferCounts(bytes=10, failures={"timeout": 1})})
    totals.take("a", 1, {SENT: TransferCounts(bytes=15, failures={"timeout": 1})})
    assert (only(totals).bytes, only(totals).failures) == (15, {"timeout": 1})
    totals.gone("a")
    totals.take("a", 1, {SENT: TransferCounts(bytes=16, failures={"timeout": 1})})
    assert only(totals).bytes == 16, "the session broke, and not the worker"
    totals.gone("a")
    totals.take("a", 2, {SENT: TransferCounts(bytes=4, failures={"timeout": 2, "aborted": 1})})
    assert only(totals).bytes == 20
    assert only(totals).failures == {"timeout": 3, "aborted": 1}
    totals.take("b", 3, {SENT: TransferCounts(bytes=100)})
    assert only(totals).bytes == 120


def test_what_is_under_way_is_that_of_the_workers_that_are_there() -> None:
    totals = TransferTotals()
    totals.take("a", 1, {SENT: TransferCounts(waiting=2, reads=3)})
    totals.take("b", 2, {SENT: TransferCounts(waiting=4)})
    assert (only(totals).waiting, only(totals).reads) == (6, 3)
    totals.take("a", 1, {SENT: TransferCounts(waiting=1)})
    assert (only(totals).waiting, only(totals).reads) == (5, 0)
    totals.gone("b")
    totals.gone("never heard of")
    assert only(totals).waiting == 1


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["count", "tell", "lose", "die"]))))
def test_no_order_of_events_loses_or_repeats_what_was_told(events: list[tuple[int, str]]) -> None:
    totals = TransferTotals()
    epochs, counts = [0, 0, 0], [TransferCounts() for _ in range(3)]
    told: dict[tuple[int, int], int] = {}
    for worker, event in events:
        if event == "count":
            counts[worker].bytes += 1
        elif event == "tell":
            totals.take(str(worker), epochs[worker], {SENT: replace(counts[worker])})
            told[worker, epochs[worker]] = counts[worker].bytes
        else:
            totals.gone(str(worker))
            if event == "die":
                epochs[worker] += 1
                counts[worker] = TransferCounts()
        assert sum(each.bytes for each in totals.sums().values()) == sum(told.values())


def test_the_exposition_has_a_series_for_each_end_and_transport() -> None:
    metrics, totals = RouterMetrics("org/model"), TransferTotals()
    metrics.export_transfers(totals)
    counts = TransferCounts(3, 7, 1000, 1.5, 11, 400, 0.5, 2, 4, 5, {"memory_full": 6})
    totals.take("a", 1, {SENT: counts, TAKEN: TransferCounts(transfers=9)})
    lines = metrics.render().decode().splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if line.startswith("hexserve:kv_transfer"))

    def value(name: str, role: str = "prefill", more: str = "") -> float:
        labels = f'engine="0",model_name="org/model",role="{role}",transport="shm"'
        return float(shown[f"hexserve:kv_transfer_{name}{{{more}{labels}}}"])

    assert value("completed_total") == 3
    assert value("completed_total", "decode") == 9
    assert value("chunks_total") == 7
    assert value("bytes_total") == 1000
    assert value("seconds_total") == 1.5
    assert value("skipped_tokens_total") == 11
    assert value("overlap_bytes_total") == 400
    assert value("overlap_seconds_total") == 0.5
    assert value("fallbacks_total") == 2
    assert value("waiting") == 4
    assert value("reads") == 5
    assert value("failures_total", more='cause="memory_full",') == 6
