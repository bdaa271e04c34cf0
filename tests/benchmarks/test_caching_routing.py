"""Part b of the caching benchmark: routing by cached prefixes beside routing by load alone."""

from __future__ import annotations

import pytest

from benchmarks import caching, caching_routing
from benchmarks.caching_routing import RoutingShape, measure_routing, play, summary

SMALL = RoutingShape(prefixes=10, prefix=128, tail=16, requests=120, blocks=70)


def test_prefixes_are_spread_and_found_again() -> None:
    joint = play(SMALL, 0, workers=1, told=True)
    routed = play(SMALL, 0, workers=2, told=True)
    blind = play(SMALL, 0, workers=2, told=False)
    most = (1 - SMALL.prefixes / SMALL.requests) * SMALL.prefix / (SMALL.prefix + SMALL.tail)
    assert 0.9 * most < joint <= most
    assert blind < routed <= joint


def test_the_target_is_the_least_that_it_may_be() -> None:
    shares = {"routed": 0.81, "blind": 0.3, "joint": 0.9}
    assert not summary(SMALL, shares).missed
    part = summary(SMALL, shares | {"routed": 0.80})
    assert part.missed == ["share of tokens cached, of one worker's is 0.889, at least 0.9"]


def test_all_targets_are_in_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        caching, "PARTS", {"b": lambda args, say: measure_routing(args, say, SMALL)}
    )
    monkeypatch.setattr(caching_routing, "LEAST", 1.5)
    monkeypatch.setenv("COLUMNS", "150")
    assert caching.main(["--parts=b", "--check"]) == 1
    shown = capsys.readouterr().out
    assert "b: share of tokens cached, of one worker's" in shown
    assert "at least 1.5" in shown
