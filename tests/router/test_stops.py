from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stops import StopScanner


def scan(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    text = "".join(scanner.push(piece) for piece in pieces)
    return text + scanner.flush(), scanner.matched


def model(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character: the first moment any stop string is complete ends the text."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "matched"),
    [
        ([], ["ab", "c"], "abc", None),
        (["x"], ["ab", "c"], "abc", None),
        (["END"], ["aE", "N", "Db"], "a", "END"),
        (["END"], ["ENDb"], "", "END"),
        (["END"], ["aEN"], "aEN", None),
        (["aab"], ["aa", "ab"], "a", "aab"),
        (["bc", "abcd"], ["abc", "d"], "a", "bc"),
        (["c", "abc"], ["xabc"], "x", "abc"),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
    ],
)
def test_text_ends_before_the_first_stop_string(
    stops: list[str], pieces: list[str], expected: str, matched: str | None
) -> None:
    assert scan(stops, pieces) == (expected, matched)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("abE") == "ab"
    assert scanner.push("x") == "Ex"
    assert scanner.push("EN") == ""
    assert scanner.push("EN") == "EN"
    assert scanner.flush() == "EN"


def test_nothing_comes_after_a_match() -> None:
    scanner = StopScanner(["."])
    assert scanner.push("a.b") == "a"
    assert scanner.push("c") == ""
    assert scanner.flush() == ""


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_agrees_with_the_model_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    text, matched = scan(stops, pieces)
    assert (text, matched is not None) == model(stops, "".join(pieces))
