"""Waits and the end of patience: which worker processes are started again, and when."""

from __future__ import annotations

from deploy.restarts import HEALTHY_S, MOST_FAILED_STARTS, MOST_WAIT_S, Restarts


def died(restarts: Restarts, ready_s: float | None, *, asked: bool = False) -> float | None:
    return restarts.after_end(ready_s=ready_s, asked=asked)


def test_waits_double_up_to_a_limit() -> None:
    restarts = Restarts(1.0)
    waits = [died(restarts, ready_s=5) for _ in range(8)]
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert waits[-1] == MOST_WAIT_S
    assert restarts.count == 8


def test_a_worker_that_was_healthy_begins_anew() -> None:
    restarts = Restarts(1.0)
    assert [died(restarts, 5), died(restarts, 5)] == [1, 2]
    assert died(restarts, HEALTHY_S) == 1
    assert died(restarts, 5) == 2


def test_one_that_was_told_to_end_starts_at_once_and_is_not_punished_later() -> None:
    restarts = Restarts(1.0)
    assert died(restarts, 5) == 1
    assert died(restarts, 5, asked=True) == 0
    assert died(restarts, 5) == 1


def test_a_crash_loop_before_it_is_ready_is_given_up() -> None:
    restarts = Restarts(1.0)
    waits = [died(restarts, ready_s=None) for _ in range(MOST_FAILED_STARTS)]
    assert None not in waits[:-1]
    assert waits[-1] is None
    assert restarts.count == MOST_FAILED_STARTS - 1


def test_one_that_ends_well_before_it_is_ready_is_a_crash_loop_as_well() -> None:
    restarts = Restarts(1.0)
    waits = [died(restarts, None, asked=True) for _ in range(MOST_FAILED_STARTS)]
    assert waits == [1, 2, 4, 8, None]


def test_one_that_was_ready_in_between_is_not_given_up() -> None:
    restarts = Restarts(1.0)
    for _ in range(3):
        for _ in range(MOST_FAILED_STARTS - 1):
            assert died(restarts, None) is not None
        assert died(restarts, ready_s=1) is not None
