"""Short prompts beside a long one: the figures, the target, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import caching, caching_short
from benchmarks.caching_short import Figures, main, measure_paced, summary
from tests.benchmarks.fake_server import FakeServer


@pytest.mark.parametrize(("beside", "missed"), [(0.15, 0), (0.16, 1)])
def test_the_target_is_of_the_median_round(beside: float, missed: int) -> None:
    figures = Figures([0.1, 0.1, 0.3], [beside, beside, 0.0], [1.0] * 3, [1.0] * 3)
    bad = Figures([0.1], [9.0], [1.0], [1.0])
    part = summary({"chunked": figures, "in order": bad}, long=50)
    assert part.rows["of that alone"] == pytest.approx((beside / 0.1, 90))
    assert len(part.missed) == missed


def test_it_is_part_c_of_the_caching_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching_short, "LONG", 600)
    monkeypatch.setattr(caching_short, "ROUNDS", 1)
    file = tmp_path / "caching.json"
    assert caching.main(["--parts=c", f"--json={file}"]) == 0
    figures = json.loads(file.read_text())["parts"]["c"]["figures"]
    assert set(figures["of that alone"]) == {"chunked prefill", "prompts in order"}


async def test_chunked_prefill_is_what_keeps_it() -> None:
    """Far from the target on either side, so that a busy machine changes nothing."""
    in_order = await measure_paced(1, chunked=False)
    chunked = await measure_paced(1, chunked=True)
    assert in_order.factor > 2
    assert chunked.factor < in_order.factor


def test_the_command(fake: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fake.ttft, fake.tpot = 0.05, 0.005
    file = tmp_path / "short.json"
    command = ["--url", fake.url, "--rounds=1", "--long=50", "--head_start=0"]
    assert main([*command, "--json", str(file)]) == 0
    assert "short TTFT p99" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["rounds"][fake.url]["short_beside"]) == 1
    fake.fault = "http"
    assert main([*command, "--check"]) == 1
    assert "cannot measure" in capsys.readouterr().out
