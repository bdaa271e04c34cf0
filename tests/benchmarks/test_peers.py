"""The comparison over fake servers: who runs, what is derived, printed and judged."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks import peer_runs, peers
from benchmarks.model_cost import ModelCost
from benchmarks.peer_report import PeerReport
from benchmarks.peer_runs import machine_figures, servers_of, with_derived
from benchmarks.peer_servers import (
    COLOCATED,
    DISAGG,
    HEXSERVE,
    INT8,
    LLAMA_BF16,
    LLAMA_Q8,
    VLLM,
    VLLM_256,
)
from benchmarks.workloads import FULL, BatchShape, Shapes, WorkloadResult
from tests.benchmarks.fake_server import FakeServer

COST = ModelCost({(16, 16): 4}, head=(16, 100), layers=1, kv_width=16, query_width=16)


@pytest.fixture
def bench(
    fakes: tuple[FakeServer, FakeServer], monkeypatch: pytest.MonkeyPatch, small_shapes: Shapes
) -> dict[str, Any]:
    """`peers` with fake servers in the place of 1,1 and vLLM, and a machine of round numbers."""
    ours, other = fakes
    asked: dict[str, Any] = {}

    @contextlib.contextmanager
    def running(commands: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
        asked["commands"] = list(commands)
        process = SimpleNamespace(pid=os.getpid())
        yield {
            label: SimpleNamespace(url=fake.url, process=process)
            for label, fake in ((DISAGG, ours), (VLLM, other))
            if label in commands
        }

    @contextlib.contextmanager
    def measuring(counts: tuple[int, ...], *_: object) -> Iterator[Any]:
        figures = {f"{name}_{count}": 1e9 for name in ("read", "matmul") for count in counts}
        yield SimpleNamespace(measure=lambda: figures)

    monkeypatch.setattr(peers, "find_spec", lambda name: name)  # torch, which CI lacks
    monkeypatch.setattr(peers, "FULL", small_shapes)
    monkeypatch.setattr(peers, "running_servers", running)
    monkeypatch.setattr(peers, "model_cost", lambda folder: COST)
    monkeypatch.setattr(peer_runs, "measuring", measuring)
    monkeypatch.setattr(peer_runs, "cpu_seconds", lambda pid: 0.0)  # the fakes are this process
    monkeypatch.setattr(peer_runs, "_SETTLE_S", 0.0)
    return asked


def command(tmp_path: Path, *options: str) -> list[str]:
    return [f"--model={tmp_path}", f"--vllm={sys.executable}", *options]


def test_rounds_alternate_and_are_judged(
    bench: dict[str, Any],
    fakes: tuple[FakeServer, FakeServer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "result.json"
    options = command(tmp_path, "--workload=w2", "--rounds=2", f"--json={file}")
    assert peers.main(options) == 0
    assert bench["commands"] == [COLOCATED, DISAGG, VLLM]
    assert fakes[0].journal[2:] == (["b"] * 4 + ["a"] * 8) * 2  # greedy, then sampled
    text = capsys.readouterr().out
    assert "w2, medians of 2 rounds" in text
    assert "left out: w2: tok/s, colocated / vLLM >= 1.3" in text
    data = json.loads(file.read_text())
    assert [each["target"] for each in data["targets"]] == [
        "w2: tok/s, 1,1 / vLLM >= 0.9",
        "w2: tok/s, 1,1: sampled / greedy >= 0.9",
        "w2: compiles after ready, 1,1 <= 0",
        "w2: compiles after ready, 1,1, sampled <= 0",
    ]
    assert all(each["measured"] is not None for each in data["targets"])
    assert len(data["workloads"]["w2"]["rounds"]) == 2


def test_sampled_requests_have_a_seed_each(
    bench: dict[str, Any], fakes: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    assert peers.main(command(tmp_path, "--workload=w2", "--rounds=1", "--seed=3")) == 0
    greedy, sampled = fakes[0].bodies[1:5], fakes[0].bodies[5:]
    assert all(body["temperature"] == 0 and "seed" not in body for body in greedy)
    assert all((body["temperature"], body["top_p"]) == (0.8, 0.95) for body in sampled)
    assert len({body["seed"] for body in sampled}) == 4


def test_missed_targets_and_failed_requests_are_named(
    bench: dict[str, Any],
    fakes: tuple[FakeServer, FakeServer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, _ = fakes
    ours.tpot, ours.compiles, ours.fault, ours.healthy_requests = 0.1, 2, "cut", 4
    options = command(tmp_path, "--workload=w2", "--rounds=1")
    assert peers.main(options) == 1  # not one sampled request succeeded
    ours.bodies.clear()
    assert peers.main([*options, "--check"]) == 1
    text = capsys.readouterr().out
    assert "no request succeeded: w2 on 1,1, sampled" in text
    assert "missed target w2: tok/s, 1,1 / vLLM >= 0.9: 0." in text
    assert "missed target w2: tok/s, 1,1: sampled / greedy >= 0.9: not measured" in text
    assert "missed target w2: compiles after ready, 1,1 <= 0: 2" in text
    assert "error: w2 on 1,1, sampled: stream ended without [DONE]" in text


def test_the_verdict_is_of_kept_targets_and_of_errors() -> None:
    console = Console(file=io.StringIO())
    report = PeerReport()
    for _ in range(2):
        ours = WorkloadResult({"ttft_p50_ms": 1.0, "output_tok_s": 95.0, "compiles": 0.0}, [], [])
        other = WorkloadResult({"ttft_p50_ms": 1.0, "output_tok_s": 100.0}, [], [])
        report.add("w2", {DISAGG: ours, VLLM: other}, {})
    assert report.verdict(console, check=True) == 0
    other.errors.append("one request of many")
    assert report.verdict(console, check=False) == 0
    assert report.verdict(console, check=True) == 1
    other.errors.clear()
    ours.figures["compiles"] = 1.0
    assert report.missed == ["w2: compiles after ready, 1,1 <= 0: 1"]
    assert report.verdict(console, check=True) == 1


def test_long_prompts_are_counted(
    bench: dict[str, Any], fakes: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    fakes[0].tpot = fakes[1].tpot = 0.005
    assert peers.main(command(tmp_path, "--workload=w4", "--rounds=1", f"--json={file}")) == 0
    figures = json.loads(file.read_text())["workloads"]["w4"]["medians"][DISAGG]
    assert figures["long_answered"] == 2
    bound = max(1.5 * figures["itl_quiet_p50_ms"], 1.15 * figures["itl_quiet_p99_ms"])
    assert figures["itl_bound_ms"] == pytest.approx(bound)


def test_w1_and_w3_have_the_machine_beside_them(
    bench: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main(command(tmp_path, "--workload=w1,w3", "--rounds=1")) == 0
    assert capsys.readouterr().out.count("reading w1's step on all cores 0.0 ms") == 2


def test_a_workload_starts_only_who_runs_it() -> None:
    assert servers_of(["w4"]) == {DISAGG, VLLM, VLLM_256}
    assert servers_of(["w2"]) == {COLOCATED, DISAGG, VLLM, LLAMA_Q8, LLAMA_BF16}
    assert servers_of(["w1", "w4"]) == {*HEXSERVE, VLLM, VLLM_256, LLAMA_Q8, LLAMA_BF16}
    assert INT8 not in servers_of(["w2", "w3", "w4"])


def test_the_machines_times_are_of_w1s_step_and_w3s_prompt() -> None:
    measured = {"read_1": 1e9, "read_2": 2e9, "matmul_1": 1e8, "matmul_2": 1e9}
    figures = machine_figures(measured, COST, FULL, cores=2)
    assert figures["read_half_ms"] == pytest.approx(COST.decode_bytes(192) / 1e6)
    assert figures["read_all_ms"] == pytest.approx(COST.decode_bytes(192) / 2e6)
    assert figures["matmul_all_ms"] == pytest.approx(COST.prompt_flops(2000) / 1e6)
    assert figures["matmul_half_ms"] == pytest.approx(COST.prompt_flops(2000) / 1e5)


def test_other_workloads_have_nothing_derived() -> None:
    result = WorkloadResult({"ttft_p50_ms": 1.0}, [], [])
    assert with_derived(result, BatchShape(1, 1, 1)).figures == {"ttft_p50_ms": 1.0}


def test_memory_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    report = PeerReport(memory={COLOCATED: [("router", 200 << 20)]})
    report.print(Console(width=100))
    assert "200" in capsys.readouterr().out
    assert report.as_json({})["peak_memory"] == {COLOCATED: [("router", 200 << 20)]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workload=w1,w9"], "unknown workload 'w9'"),
        (["--rounds=0"], "not at least 1"),
        (["--model=/nowhere"], "no such folder"),
        (["--vllm=/nowhere/vllm"], "--vllm /nowhere/vllm: no such file"),
        (["--llama", sys.executable], "go together"),
        (["--llama_q8", sys.executable], "go together"),
        (["--json=/nowhere/at/all.json"], "no such folder"),
    ],
)
def test_a_wrong_command_line_is_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        peers.main([f"--model={tmp_path}", *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
