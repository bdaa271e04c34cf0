"""Deployments through real processes: right answers, readable lines, and nothing left behind."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.deploy.conftest import Launch
from tests.deploy.launch import (
    HEX_LLM,
    HEXSERVE,
    STOP_S,
    alive,
    children,
    complete,
    expected_tokens,
    get,
    shared_memory_files,
)

PROMPT = [5, 17, 300, 2]
SERVE = (*HEXSERVE, "serve")


@pytest.mark.parametrize(
    ("command", "workers", "number"),
    [
        (SERVE, {"worker-0": "colocated"}, signal.SIGTERM),
        ((*SERVE, "--disagg_topo=1,1"), {"prefill-0": "prefill", "decode-0": "decode"},
         signal.SIGINT),
        ((*SERVE, "--disagg-topo", "2,1"),
         {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}, signal.SIGTERM),
        ((*SERVE, "--data_parallel_size=2"),
         {"worker-0": "colocated", "worker-1": "colocated"}, signal.SIGTERM),
        ((*HEX_LLM, "--disagg_topo=1,2", "--host=127.0.0.1"),
         {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}, signal.SIGINT),
    ],
    ids=["colocated", "1,1", "2,1", "2 colocated", "hex_llm 1,2"],
)  # fmt: skip
def test_a_deployment_answers_and_ends_without_a_trace(
    launch: Launch,
    scratch: Path,
    command: tuple[str, ...],
    workers: dict[str, str],
    number: signal.Signals,
) -> None:
    launcher = launch(*command, "--model=fake", "--port=0")
    url = launcher.ready_url()
    for length in (1, 40, 400):
        prompt = (PROMPT * length)[:length]
        assert complete(url, prompt, 20) == expected_tokens(prompt, 20)
    health = get(url, "/health")
    assert (health.status_code, get(url, "/ping").status_code) == (200, 200)
    assert [worker["state"] for worker in health.json()["workers"]] == ["ready"] * len(workers)

    pids = [launcher.worker_pid(name) for name in workers]
    assert sorted(children(launcher.pid)) == sorted(pids)
    for name, role in workers.items():
        launcher.wait_for(rf"\[{name}\] .*{role} worker ready at unix:{scratch}")
    shared = set().union(*(shared_memory_files(pid) for pid in (*pids, launcher.pid)))

    assert launcher.stop(number) < STOP_S
    assert launcher.exit_code() == 0
    assert not [pid for pid in pids if alive(pid)]
    assert list(scratch.iterdir()) == []
    assert not [path for path in shared if path.exists()]
    assert "Traceback" not in launcher.output
    assert not re.search(r"^[IWE]\d{4} ", launcher.output, re.M), "gRPC's own lines"


def test_one_process_of_workers_in_threads_answers_and_ends_without_a_trace(
    launch: Launch, scratch: Path
) -> None:
    launcher = launch(
        *SERVE,
        "--model=fake",
        "--port=0",
        "--disagg_topo=2,1",
        "--worker-distributed-method=thread",
    )
    url = launcher.ready_url()
    for length in (1, 40, 400):
        prompt = (PROMPT * length)[:length]
        assert complete(url, prompt, 20) == expected_tokens(prompt, 20)
    pid = launcher.worker_pid("workers")
    assert children(launcher.pid) == [pid]
    for name, role in (("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode")):
        launcher.wait_for(rf"\[workers\] .*{role} worker ready at unix:{scratch}/.*/{name}.sock")
    assert launcher.stop() < STOP_S
    assert launcher.exit_code() == 0
    assert not alive(pid)
    assert list(scratch.iterdir()) == []
    assert "Traceback" not in launcher.output


def test_the_lines_tell_a_person_what_runs_where(launch: Launch) -> None:
    launcher = launch(*SERVE, "--model=fake", "--port=0", "--disagg_topo=1,1")
    url = launcher.ready_url()
    assert url.startswith("http://127.0.0.1:")
    launcher.wait_for(r"fake: 1 prefill and 1 decode workers")
    launcher.wait_for(rf"listening at {url}")
    launcher.wait_for(r"prefill-0: process \d+ on (cores \(|all cores)")
    launcher.wait_for(r"decode worker ready at .*: 65536 tokens of context, 32 sequences")
    launcher.wait_for(rf"ready at {url} after \d+\.\d s")


def test_workers_come_from_the_installation_whatever_the_current_folder_holds(
    launch: Launch, tmp_path: Path
) -> None:
    for room in ("deploy", "settings", "engine"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    launcher = launch(*SERVE, "--model=fake", "--port=0", cwd=tmp_path)
    assert complete(launcher.ready_url(), PROMPT, 3) == expected_tokens(PROMPT, 3)


def test_vertex_variables_are_honoured(launch: Launch, fake_folder: Path) -> None:
    launcher = launch(
        *HEX_LLM,
        "--port=0",
        AIP_STORAGE_URI=str(fake_folder),
        AIP_HEALTH_ROUTE="/health/vertex",
        AIP_PREDICT_ROUTE="/predict/vertex",
    )
    url = launcher.ready_url()
    assert url.startswith("http://0.0.0.0:")
    local = url.replace("0.0.0.0", "127.0.0.1")
    assert get(local, "/health/vertex").status_code == 200
    assert get(local, "/predict/vertex").status_code == 405  # it is there, for POST


def test_version_and_help_answer_without_loading_anything(launch: Launch) -> None:
    shown = launch(*HEXSERVE, "--version")
    assert shown.exit_code() == 0
    assert re.fullmatch(r"hexserve \d+\.\d+\.\d+", shown.output)
    shown = launch(*HEXSERVE, "serve", "--help")
    assert shown.exit_code() == 0
    assert "--disagg_topo" in shown.output
    for wrong in ((), ("sevre",)):
        shown = launch(*HEXSERVE, *wrong)
        assert shown.exit_code() == 2
        assert "usage: hexserve COMMAND" in shown.output
