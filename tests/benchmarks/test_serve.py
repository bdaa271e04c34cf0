"""The command: alternating, JSON, exit status and refusals."""

import json
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.serve import main
from benchmarks.workloads import Shapes
from tests.benchmarks.fake_server import FakeServer

pytestmark = pytest.mark.usefixtures("small_shapes")


def test_one_server_all_workloads(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.tpot = 0.002
    assert main(["--url", fake.url, "--check"]) == 0
    text = capsys.readouterr().out
    for name in ("w1", "w2", "w3", "w4: ITL max ms", "check passed"):
        assert name in text
    assert {body["model"] for body in fake.bodies} == {"a-model"}


def test_two_servers_alternate_with_fresh_prompts(fakes: tuple[FakeServer, FakeServer]) -> None:
    first, second = fakes
    command = ["--url", first.url, "--url", second.url, "--workload", "w1", "--rounds", "3"]
    assert main([*command, "--model", "m"]) == 0
    runs = [(name, len(list(group))) for name, group in groupby(first.journal)]
    assert runs == [("a", 1), ("b", 1), *[("a", 2), ("b", 2)] * 3]
    prompts = [body["prompt"] for body in first.bodies + second.bodies]
    assert len(set(prompts)) == len(prompts)
    assert {body["model"] for body in first.bodies} == {"m"}


def test_the_seed_fixes_the_prompts(fake: FakeServer) -> None:
    for _ in range(2):
        assert main(["--url", fake.url, "--workload", "w3", "--seed", "5"]) == 0
    prompts = [body["prompt"] for body in fake.bodies]
    assert prompts[:2] == prompts[2:]


def test_json_has_rounds_medians_and_ratios(
    fakes: tuple[FakeServer, FakeServer], tmp_path: Path, small_shapes: Shapes
) -> None:
    first, second = fakes
    first.ttft, second.ttft = 0.05, 0.01
    file = tmp_path / "result.json"
    command = ["--url", first.url, "--url", second.url, "--label", "new", "--label", "old"]
    command += ["--workload", "w2,w3", "--rounds", "2", "--seed", "1", "--json", str(file)]
    assert main(command) == 0
    data = json.loads(file.read_text())
    assert data["seed"] == 1
    assert data["rounds"] == 2
    assert data["host"]["cores"]
    assert data["shapes"]["w3"]["prompt_tokens"] == 30
    assert [server["label"] for server in data["servers"]] == ["new", "old"]
    assert [server["model"] for server in data["servers"]] == ["a-model", "b-model"]
    workload = data["workloads"]["w2"]
    new = workload["servers"]["new"]
    assert len(new["rounds"]) == 2
    assert len(new["rounds"][0]["requests"]) == 4
    assert new["rounds"][0]["requests"][0]["output_tokens"] == 4
    values = [round_["figures"]["ttft_p50_ms"] for round_ in new["rounds"]]
    assert new["median"]["ttft_p50_ms"] == pytest.approx(sum(values) / 2)
    assert workload["ratio"]["ttft_p50_ms"] > 1
    assert len(workload["round_ratios"]["ttft_p50_ms"]) == 2


def test_a_missed_target_is_named(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--url", fake.url, "--workload", "w3", "--target", "w3.ttft_p50_ms<5000"]
    assert main(command) == 0
    assert main([*command, "--target", "w3.prefill_tok_s>=1e12"]) == 1
    text = capsys.readouterr().out
    assert "missed target w3.prefill_tok_s>=1e+12: is" in text
    assert "missed target w3.ttft" not in text


def test_a_failed_request_fails_the_check_only(fake: FakeServer) -> None:
    command = ["--url", fake.url, "--workload", "w1"]
    fake.fault, fake.healthy_requests = "cut", 2
    assert main(command) == 0
    fake.bodies.clear()
    assert main([*command, "--check"]) == 1


def test_a_workload_that_fails_ends_early_and_fails_the_run(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fault, fake.healthy_requests = "http", 1
    assert main(["--url", fake.url, "--workload", "w3", "--rounds", "3"]) == 1
    assert len(fake.bodies) == 2
    text = capsys.readouterr().out
    assert "FAILED: w3" in text
    assert "no room left" in text


def test_a_server_that_cannot_be_measured(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    assert "cannot measure http://127.0.0.1:9/v1/models: ConnectError" in capsys.readouterr().err
    fake.fault = "http"
    assert main(["--url", fake.url]) == 1
    assert "no room left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "http://b", "--url", "http://c"], "twice at most"),
        (["--url", "b"], "must start with http"),
        (["--workload", "w1,w9"], "unknown workload 'w9'"),
        (["--model", "a", "--model", "b"], "--model must be given once"),
        (["--label", "a", "--label", "a"], "--label must be given once"),
        (["--target", "nonsense"], "is not like"),
        (["--target", "w1.speed>=1"], "no figure 'speed'"),
        (["--workload", "w1", "--target", "w2.ttft_p50_ms<1"], "'w2' is not run"),
        (["--json", "/nowhere/at/all.json"], "no such folder"),
        (["--rounds", "0"], "not at least 1"),
        (["--extra", "[]"], "not a JSON object"),
    ],
)
def test_a_wrong_command_line_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--url", "http://a", *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
