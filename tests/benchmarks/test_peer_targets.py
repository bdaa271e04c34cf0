"""Targets from figures made by hand."""

import pytest

from benchmarks.peer_servers import COLOCATED, DISAGG, VLLM, VLLM_256
from benchmarks.peer_targets import GOALS, MACHINE, Round, judge, left_out, stream_bound_ms


def kept(rounds: dict[str, list[Round]]) -> dict[str, bool]:
    return {verdict.goal.what: verdict.kept for verdict in judge(rounds)}


def test_a_peers_goal_is_the_median_of_the_rounds_quotients() -> None:
    slow_round = {COLOCATED: {"tpot_p50_ms": 80.0}, VLLM: {"tpot_p50_ms": 90.0}}
    quick_rounds = [{COLOCATED: {"tpot_p50_ms": 22.0}, VLLM: {"tpot_p50_ms": 20.0}}] * 2
    (verdict, *_) = judge({"w1": [slow_round, *quick_rounds]})
    assert verdict.goal.what == "TPOT, colocated / vLLM"
    assert verdict.value == pytest.approx(1.1)
    assert not verdict.kept


def test_the_better_of_two_settings_counts() -> None:
    figures: Round = {
        DISAGG: {"itl_p99_ms": 50.0, "output_tok_s": 100.0},
        VLLM: {"itl_p99_ms": 2000.0, "output_tok_s": 110.0},
        VLLM_256: {"itl_p99_ms": 250.0, "output_tok_s": 90.0},
    }
    found = {verdict.goal.what: verdict for verdict in judge({"w4": [figures]})}
    assert found["ITL p99, 1,1 / better vLLM"].value == pytest.approx(0.2)
    assert found["ITL p99, 1,1 / better vLLM"].kept
    assert not found["streams' tok/s, 1,1 / better vLLM"].kept


def test_the_machine_is_a_contender() -> None:
    figures: Round = {
        MACHINE: {"read_all_ms": 10.0, "read_half_ms": 20.0},
        COLOCATED: {"tpot_p50_ms": 12.5},
        DISAGG: {"tpot_p50_ms": 26.0},
    }
    assert kept({"w1": [figures]}) == {
        "TPOT, colocated / reading weights and KV once": True,
        "TPOT, 1,1 / reading them once on its own cores": False,
        "compiles after ready, colocated": False,  # not measured
        "compiles after ready, 1,1": False,
    }


def test_every_round_must_answer_and_compile_nothing() -> None:
    good = {DISAGG: {"long_answered": 10.0, "compiles": 0.0}}
    bad = {DISAGG: {"long_answered": 9.0, "compiles": 1.0}}
    names = ("long prompts answered, 1,1", "compiles after ready, 1,1")
    assert [kept({"w4": [good] * 3})[name] for name in names] == [True, True]
    assert [kept({"w4": [good, bad, good]})[name] for name in names] == [False, False]


def test_a_figure_missing_in_one_round_is_no_measurement() -> None:
    rounds: list[Round] = [
        {COLOCATED: {"ttft_p50_ms": 1.0}, VLLM: {"ttft_p50_ms": value}} for value in (2.0, None)
    ]
    (verdict, *_) = judge({"w3": rounds})
    assert verdict.value is None
    assert not verdict.kept


def test_goals_without_their_peer_are_left_out_and_named() -> None:
    rounds: dict[str, list[Round]] = {"w3": [{COLOCATED: {"ttft_p50_ms": 1.0}}]}
    assert [goal.what for goal in left_out(rounds)] == [
        "TTFT, colocated / vLLM",
        "FLOP/s, colocated / best matmul",
        "compiles after ready, 1,1",
    ]
    assert left_out({}) == []


def test_the_streams_bound_is_the_looser_of_two() -> None:
    assert stream_bound_ms({"itl_quiet_p50_ms": 10.0, "itl_quiet_p99_ms": 12.0}) == 15.0
    assert stream_bound_ms({"itl_quiet_p50_ms": 10.0, "itl_quiet_p99_ms": 20.0}) == 23.0
    assert stream_bound_ms({"itl_quiet_p50_ms": None, "itl_quiet_p99_ms": 20.0}) is None


def test_goals_have_different_names() -> None:
    assert len({goal.name for goal in GOALS}) == len(GOALS)
