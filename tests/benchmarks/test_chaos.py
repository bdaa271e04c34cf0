"""benchmarks.chaos: its tables of moments, its judgement, and short runs on the fake model."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import socket
import threading
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import chaos
from benchmarks.chaos_aborts import draw_leaving
from benchmarks.chaos_faults import (
    ON_PROCESSES,
    ON_SESSIONS,
    ON_TRANSFERS,
    POINTS,
    TRANSFER_POINTS,
    WEIGHTS,
    DoneFault,
    Fault,
    plan_faults,
)
from benchmarks.chaos_leaks import SPARE, Held, held_by, resident_bytes, surplus
from benchmarks.chaos_orders import MESSAGES, Harm
from benchmarks.chaos_report import MOST_GROWTH, Outcome
from benchmarks.chaos_requests import Answer, Choice, Tally, draw_bodies
from engine.sequence import SequenceState
from kvtransfer.protocol import TRANSITIONS, State


def test_every_state_that_a_sequence_can_be_lost_in_has_a_fault() -> None:
    assert set(POINTS) == {state.value for state in SequenceState} - {SequenceState.ENDED.value}
    assert set(WEIGHTS) == set(Fault) == {*ON_PROCESSES, *ON_SESSIONS, *ON_TRANSFERS}


def test_every_state_that_a_transfer_can_be_lost_in_has_a_fault() -> None:
    assert set(TRANSFER_POINTS.values()) == {state for state in State if not state.over}
    assert all(step in TRANSITIONS for step in MESSAGES.items()), "each is sent in its state"
    on_processes = set(ON_PROCESSES.values())
    assert set(ON_TRANSFERS.values()) == set(ON_SESSIONS.values()) == set(Harm) - on_processes


def test_a_seed_draws_the_same_requests_faults_and_leavings() -> None:
    def draw(seed: int) -> tuple:
        rng = random.Random(seed)
        return (
            draw_bodies(rng, 30),
            list(islice(plan_faults(rng, 5.0), 50)),
            draw_leaving(rng, 9, 3),
        )

    assert draw(3) == draw(3) != draw(4)
    bodies = draw_bodies(random.Random(3), 200)
    for name in ("stream", "seed", "logprobs", "presence_penalty"):
        assert 0 < sum(name in body for body in bodies) < 200
    assert {body.get("n", 1) for body in bodies} == {1, 2}
    plans = list(islice(plan_faults(random.Random(3), 5.0), 2000))
    assert {plan.fault for plan in plans} == set(Fault)
    assert {plan.point for plan in plans} == set(POINTS) | set(TRANSFER_POINTS)
    assert 4 < sum(plan.after_s for plan in plans) / len(plans) < 6


RIGHT_CHOICE = Choice("ab", [1, 2], [-0.5, -1.0], "length", [1.0, 2.0])
RIGHT = Answer(200, {0: RIGHT_CHOICE, 1: RIGHT_CHOICE}, {"total_tokens": 7})


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
        ({"choices": {0: RIGHT_CHOICE}}, 0, 0, 1),
        ({"error": "lost"}, 0, 1, 0),
        ({"status": 503, "error": "no worker"}, 1, 0, 0),
        ({"status": 500, "error": "lost"}, 0, 1, 0),
    ],
)
def test_answers_are_judged(change: dict, refused: int, errors: int, mismatches: int) -> None:
    tally = Tally()
    own = {f.name for f in dataclasses.fields(Choice)} & change.keys()
    choices = {0: RIGHT_CHOICE, 1: dataclasses.replace(RIGHT_CHOICE, **change)} if own else None
    changed = dataclasses.replace(RIGHT, **({"choices": choices} if own else change))
    tally.add(changed, RIGHT)
    assert (tally.refused, len(tally.errors), len(tally.mismatches)) == (
        refused, errors, mismatches
    )  # fmt: skip


def test_a_gap_is_between_the_events_around_a_fault() -> None:
    outcome = Outcome()
    outcome.tally.add(RIGHT, RIGHT)
    for at in (0.5, 1.5, 2.5):
        outcome.faults.append(DoneFault(Fault.KILL, "decoding", "decode-0", at, True))
    assert outcome.gaps == [1.0]
    assert outcome.failures() == []
    outcome.leaks.append("decode-0 holds 3 blocks")
    assert outcome.failures() == ["decode-0 holds 3 blocks"]


def test_what_a_process_holds_is_counted() -> None:
    before = held_by(os.getpid())
    assert before is not None
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with socket.socket():
        now = held_by(os.getpid())
    done.set()
    thread.join()
    assert now is not None
    assert (now.sockets, now.threads) == (before.sockets + 1, before.threads + 1)
    assert now.descriptors >= before.descriptors + 1
    assert held_by(2**22 + 1) is None
    assert resident_bytes(2**22 + 1) is None
    assert (resident_bytes(os.getpid()) or 0) > 2**20


def test_only_more_than_is_spare_is_a_leak() -> None:
    first = {"router": Held(5, 1, 20, 10), "gone": Held()}
    spare = dataclasses.astuple(SPARE)
    kept = Held(*(a + b for a, b in zip((5, 1, 20, 10), spare, strict=True)))
    assert surplus(first, {"router": kept, "new": Held(99, 99, 99, 99)}) == []
    more = dataclasses.replace(kept, segments=kept.segments + 1)
    assert surplus(first, {"router": more}) == ["router holds 2 segments, at first 1"]


@pytest.mark.parametrize(("last", "fails"), [(1000, False), (1029, False), (1031, True)])
def test_memory_may_not_grow_in_the_second_half(last: int, fails: bool) -> None:
    assert MOST_GROWTH == 0.03
    outcome = Outcome(memory={"router": [100, 500, 700, 990, 1000, 1000, 995, last]})
    assert bool(outcome.failures()) == fails


def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], *arguments: str) -> dict:
    figures, log = tmp_path / "chaos.json", tmp_path / "serve.log"
    code = chaos.main([*arguments, "--seed=5", f"--json={figures}", f"--log={log}", "--check"])
    assert code == 0, capfd.readouterr().err + log.read_text()
    measured: dict = json.loads(figures.read_text())
    return measured


@pytest.mark.timeout(240)
def test_a_short_run_loses_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    measured = run(
        tmp_path, capfd, "--minutes=0.2", "--every-s=0.5", "--disagg_topo=1,1", "--clients=3"
    )
    assert measured["requests"] > 10
    assert sum(measured["faults"].values()) >= 2


@pytest.mark.timeout(240)
def test_a_few_aborts_leave_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    measured = run(tmp_path, capfd, "--aborts=400", "--disagg_topo=1,1")
    assert sum(measured["aborted"].values()) == 400
    assert min(measured["aborted"].values()) > 10
    assert set(measured["memory_mib"]) == {"router", "prefill-0", "decode-0"}
