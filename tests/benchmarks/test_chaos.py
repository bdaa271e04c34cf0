"""benchmarks.chaos: its table of moments, its judgement, and a short run on the fake model."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from benchmarks import chaos
from benchmarks.chaos_faults import POINTS, WEIGHTS, DoneFault, Fault
from benchmarks.chaos_requests import Answer, Tally, draw_bodies
from engine.sequence import SequenceState


def test_every_state_that_a_sequence_can_be_lost_in_has_a_fault() -> None:
    assert set(POINTS) == {state.value for state in SequenceState} - {SequenceState.ENDED.value}
    assert set(WEIGHTS) == set(Fault)


def test_a_seed_draws_the_same_requests() -> None:
    assert draw_bodies(random.Random(3), 30) == draw_bodies(random.Random(3), 30)
    bodies = draw_bodies(random.Random(3), 200)
    for name in ("stream", "seed", "logprobs", "presence_penalty"):
        assert 0 < sum(name in body for body in bodies) < 200


RIGHT = Answer(200, "ab", [1, 2], [-0.5, -1.0], "length", {"total_tokens": 7}, times=[1.0, 2.0])


@pytest.mark.parametrize(
    ("change", "refused", "errors", "mismatches"),
    [
        ({"logprobs": [-0.5, -1.00001]}, 0, 0, 0),
        ({"logprobs": [-0.5, -1.1]}, 0, 0, 1),
        ({"logprobs": [-0.5]}, 0, 0, 1),
        ({"tokens": [1, 3]}, 0, 0, 1),
        ({"text": "a"}, 0, 0, 1),
        ({"finish": "stop"}, 0, 0, 1),
        ({"usage": {"total_tokens": 8}}, 0, 0, 1),
        ({"error": "lost"}, 0, 1, 0),
        ({"status": 503, "error": "no worker"}, 1, 0, 0),
        ({"status": 500, "error": "lost"}, 0, 1, 0),
    ],
)
def test_answers_are_judged(change: dict, refused: int, errors: int, mismatches: int) -> None:
    tally = Tally()
    tally.add(dataclasses.replace(RIGHT, **change), RIGHT)
    assert (tally.refused, len(tally.errors), len(tally.mismatches)) == (
        refused, errors, mismatches
    )  # fmt: skip


def test_a_gap_is_between_the_events_around_a_fault() -> None:
    outcome = chaos.Outcome()
    outcome.tally.add(RIGHT, RIGHT)
    for at in (0.5, 1.5, 2.5):
        outcome.faults.append(DoneFault(Fault.KILL, "decoding", "decode-0", at, True))
    assert outcome.gaps == [1.0]
    assert outcome.failures() == []
    outcome.leaks.append("decode-0 holds 3 blocks")
    assert outcome.failures() == ["decode-0 holds 3 blocks"]


@pytest.mark.timeout(180)
def test_a_short_run_loses_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    figures, log = tmp_path / "chaos.json", tmp_path / "serve.log"
    code = chaos.main(
        ["--minutes=0.15", "--every-s=0.7", "--disagg_topo=1,1", "--clients=3", "--seed=5",
         f"--json={figures}", f"--log={log}", "--check"]
    )  # fmt: skip
    assert code == 0, capfd.readouterr().err + log.read_text()
    measured = json.loads(figures.read_text())
    assert measured["requests"] > 10
    assert sum(measured["faults"].values()) >= 2
