"""Part d of the caching benchmark: its figures, and that a choice is the same when all else is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import caching, caching_choice
from benchmarks.caching_choice import Deployment, FleetShape, summary
from engine.types import COLOCATED, Role
from protos.codec import NO_ROLES

SMALL = FleetShape(workers=20, blocks=600, chain=30, holders=2, asked=20, choices=30)
PAIR = (Role.PREFILL, Role.DECODE)


def choices(roles: Sequence[Role], spare: Role, seed: int) -> list[tuple[int | None, ...]]:
    deployment = Deployment(SMALL, roles, spare, seed)
    placements = [deployment.place()[0] for _ in range(50)]
    return [tuple(worker.row for worker, _ in each.workers) for each in placements]


@pytest.mark.parametrize(
    ("roles", "spare"), [((COLOCATED,), NO_ROLES), (PAIR, NO_ROLES), (PAIR, Role.PREFILL)]
)
def test_the_same_requests_state_and_seed_give_the_same_choices(
    roles: Sequence[Role], spare: Role
) -> None:
    assert choices(roles, spare, 3) == choices(roles, spare, 3)
    assert choices(roles, spare, 3) != choices(roles, spare, 4)


def test_the_slowest_way_is_held_against_the_target_too() -> None:
    part = summary(SMALL, {"colocated": [50e-6, 99e-6, 1.0], "pairs": [101e-6] * 3})
    assert part.rows["p50 us"] == pytest.approx((99, 101))
    assert [line.split(" is ")[0] for line in part.missed] == ["p50 us, pairs"]


def test_it_is_part_d_of_the_caching_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching_choice, "FleetShape", lambda: SMALL)
    file = tmp_path / "caching.json"
    assert caching.main(["--parts=d", f"--json={file}"]) == 0
    figures = json.loads(file.read_text())["parts"]["d"]["figures"]
    assert set(figures["p99 us"]) == {"colocated", "pairs", "pairs, decode may prefill"}
