"""Percentiles, medians and host facts."""

import pytest

from benchmarks.stats import host_info, median, milliseconds, percentile, ratio


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([], 50, None),
        ([7.0], 0, 7.0),
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([4.0, 3.0, 2.0, 1.0], 50, 2.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1, 101)], 100, 100.0),
        ([float(n) for n in range(1, 17)], 99, 16.0),
    ],
)
def test_percentile_is_nearest_rank(values: list[float], q: float, expected: float | None) -> None:
    assert percentile(values, q) == expected


@pytest.mark.parametrize("q", [-1, 100.5])
def test_percentile_refuses_what_is_no_percentage(q: float) -> None:
    with pytest.raises(ValueError, match=r"0\.\.100"):
        percentile([1.0], q)


def test_median_leaves_out_what_was_not_measured() -> None:
    assert median([None, 1.0, 3.0]) == 2.0
    assert median([None]) is None


def test_ratio_needs_both_sides() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(0.0, 2.0) == 0.0
    assert ratio(None, 2.0) is None
    assert ratio(3.0, None) is None
    assert ratio(3.0, 0.0) is None


def test_milliseconds() -> None:
    assert milliseconds(0.25) == 250.0
    assert milliseconds(None) is None


def test_host_info_names_cores_and_python() -> None:
    info = host_info()
    assert isinstance(info["cores"], int)
    assert str(info["python"]).count(".") == 2
