"""benchmarks.caching: its arithmetic, and part a on the fake model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import caching, caching_chat
from benchmarks.caching_chat import ChatShape, Turn, distinct_tokens, summary
from benchmarks.caching_part import Part

SMALL = ChatShape(users=3, turns=3, system=100, question=20, answer=10)


def test_tokens_that_begin_alike_count_once() -> None:
    turns = [Turn(0, [1, 2, 3], [4]), Turn(1, [1, 2, 3, 4, 5], [6]), Turn(0, [1, 2, 9], [4])]
    assert distinct_tokens(turns) == 6 + 2
    assert distinct_tokens([]) == 0


def test_what_is_held_against_the_targets() -> None:
    def turns(cached: int, ttft: float) -> list[Turn]:
        return [
            Turn(0, [1] * 10, [2] * 2, 0, 9.0),
            Turn(1, [1] * 10 + [2] * 2 + [3] * 4, [4], cached, ttft),
        ]

    part = summary(SMALL, {"cache": turns(12, 1.0), "no cache": turns(0, 4.0)})
    assert part.rows["prompt tokens computed"] == (14, 26)
    assert part.rows["distinct tokens"] == (17, 17)
    assert part.bounds["computed, of the distinct"] == (14 / 17, 1.05)
    assert part.bounds["TTFT of other turns, of that without"] == (0.25, 0.25)
    assert not part.missed
    worse = summary(SMALL, {"cache": turns(0, 1.1), "no cache": turns(0, 4.0)})
    assert [line.split(" is ")[0] for line in worse.missed] == list(part.bounds)


def test_a_part_that_was_not_measured_has_missed() -> None:
    part = Part("t", ("x",), {"n": (None,)}, {"b": (None, 1.0)})
    assert part.missed == ["b is not measured, at most 1"]
    assert part.as_json()["figures"] == {"n": {"x": None}}


@pytest.mark.parametrize("topology", [None, "1,1"])
def test_part_a_on_the_fake_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str | None
) -> None:
    monkeypatch.setattr(caching_chat, "ChatShape", lambda: SMALL)
    figures = tmp_path / "caching.json"
    more = [] if topology is None else [f"--disagg_topo={topology}"]
    assert caching.main(["--parts=a", "--model=fake", f"--json={figures}", *more]) == 0
    measured = json.loads(figures.read_text())["parts"]["a"]
    assert measured["figures"]["prompt tokens"]["cache"] == 3 * (120 + 150 + 180)
    # Its tokens are bytes: first questions begin alike, with a space at least.
    assert 360 <= measured["figures"]["distinct tokens"]["cache"] < 100 + 3 * 3 * 30
    assert measured["figures"]["prompt tokens computed"]["no cache"] == 1350
    assert measured["bounds"]["computed, of the distinct"]["value"] < 1.2


@pytest.mark.parametrize("parts", ["", "z", "a,q"])
def test_parts_that_are_none(parts: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        caching.main([f"--parts={parts}"])
    assert "the parts are a" in capsys.readouterr().err
