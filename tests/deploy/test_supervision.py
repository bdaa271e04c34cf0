"""Workers that die, hang or are told to end under a launcher: started again, nothing lost."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path

import httpx
import pytest

from deploy.restarts import MOST_FAILED_STARTS
from tests.deploy.conftest import Launch
from tests.deploy.launch import (
    HEXSERVE,
    STOP_S,
    Launched,
    alive,
    complete,
    expected_tokens,
    get,
    kill,
    wait_until,
)

PROMPT = [3, 1, 4, 1, 5]
SERVE = (*HEXSERVE, "serve", "--model=fake", "--port=0", "--restart_wait_s=0.1")


def states(url: str) -> list[str]:
    return [worker["state"] for worker in get(url, "/health").json()["workers"]]


def restarts(url: str) -> int:
    found = re.search(
        r"^hexserve:worker_restarts_total\{.*\} (.*)$", get(url, "/metrics").text, re.M
    )
    assert found
    return int(float(found[1]))


def pids(launcher: Launched, name: str) -> list[int]:
    """The process ids of a worker, in the order of its starts."""
    lines = (re.search(rf"launcher: {name}: process (\d+)", line) for line in launcher.lines)
    return [int(match[1]) for match in lines if match]


class Load:
    """Clients that ask one thing after the other until told to stop, and note what is wrong."""

    def __init__(self, url: str, clients: int, tokens: int) -> None:
        self.served = 0
        self.wrong: list[str] = []
        self._url, self._tokens = url, tokens
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        length = 1 + 7 * number
        while not self._stop.is_set():
            length = 1 + (length + 13) % 300
            prompt = (PROMPT * length)[:length]
            try:
                answer = complete(self._url, prompt, self._tokens)
            except (AssertionError, httpx.HTTPError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                return
            if answer != expected_tokens(prompt, self._tokens):
                self.wrong.append(f"other tokens after a prompt of {length}")
                return
            self.served += 1

    def goes_on(self, requests: int = 5) -> None:
        """Some more are served, or something is wrong."""
        before = self.served
        wait_until(lambda: self.wrong or self.served >= before + requests, "more are served", 30)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_the_only_worker_of_a_role_is_killed_and_no_request_fails(
    launch: Launch, name: str
) -> None:
    launcher = launch(*SERVE, "--disagg_topo=1,1")
    url = launcher.ready_url()
    with Load(url, clients=2, tokens=300) as load:
        load.goes_on()
        kill(launcher.worker_pid(name))
        launcher.wait_for(rf"hexserve\.launcher: {name} has ended with code -9; its last lines:")
        wait_until(lambda: restarts(url) == 1 and states(url) == ["ready"] * 2, "it is there again")
        load.goes_on()
    assert load.wrong == []
    assert len(pids(launcher, name)) == 2
    assert launcher.stop(signal.SIGTERM) < STOP_S
    assert launcher.exit_code() == 0
    assert not any(alive(pid) for pid in pids(launcher, name))
    assert "Traceback" not in launcher.output


def test_decode_workers_prefill_while_no_prefill_worker_is_left(launch: Launch) -> None:
    flags = ("--disagg_topo=1,1", "--decode_may_prefill", "--worker_wait_s=0")
    launcher = launch(*HEXSERVE, "serve", "--model=fake", "--port=0", *flags)
    url = launcher.ready_url()
    kill(launcher.worker_pid("prefill-0"))
    wait_until(lambda: states(url)[0] != "ready", "it is missed")
    assert complete(url, PROMPT, 30) == expected_tokens(PROMPT, 30)
    assert get(url, "/ping").status_code == 200


def test_a_rolling_restart_of_all_workers_loses_nothing(launch: Launch) -> None:
    launcher = launch(*SERVE, "--disagg_topo=2,2")
    url = launcher.ready_url()
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    with Load(url, clients=3, tokens=300) as load:
        for number, name in enumerate(names):
            load.goes_on()
            kill(pids(launcher, name)[-1], signal.SIGTERM)
            launcher.wait_for(rf"hexserve\.launcher: {name} has ended with code 0")
            wait_until(
                lambda n=number: restarts(url) == n + 1 and states(url) == ["ready"] * 4,
                f"{name} is there again",
            )
        load.goes_on()
    assert load.wrong == []
    assert "is lost" not in launcher.output
    assert "Traceback" not in launcher.output


def test_a_worker_is_drained_over_http_under_load(launch: Launch) -> None:
    launcher = launch(*SERVE, "--disagg_topo=1,1", "--admin")
    url = launcher.ready_url()
    addresses = [worker["address"] for worker in get(url, "/health").json()["workers"]]
    with Load(url, clients=2, tokens=300) as load:
        for number, address in enumerate(addresses):
            load.goes_on()
            body = {"worker": address}
            answer = httpx.post(f"{url}/admin/drain", json=body, timeout=10, trust_env=False)
            assert answer.json() == {"worker": address, "state": "draining"}
            name = Path(address).stem
            launcher.wait_for(rf"hexserve\.launcher: {name} has ended with code 0")
            wait_until(
                lambda n=number: restarts(url) == n + 1 and states(url) == ["ready"] * 2,
                f"{name} is there again",
            )
        load.goes_on()
    assert load.wrong == []
    assert "is lost" not in launcher.output


def test_a_worker_that_hangs_is_killed_and_started_again(launch: Launch) -> None:
    launcher = launch(*SERVE)
    url = launcher.ready_url()
    hung = launcher.worker_pid("worker-0")
    kill(hung, signal.SIGSTOP)
    launcher.wait_for("is lost: silent for 3 s", 10)
    launcher.wait_for("worker-0 has been silent for 10 s: killed", 15)
    assert complete(url, PROMPT, 3) == expected_tokens(PROMPT, 3)
    assert not alive(hung)
    assert restarts(url) == 1


def test_a_worker_that_hangs_before_it_is_ready_is_killed_and_started_again(
    launch: Launch,
) -> None:
    launcher = launch(*SERVE, "--disagg_topo=1,1", "--start_limit_s=3")
    url = launcher.ready_url()
    kill(launcher.worker_pid("decode-0"))
    wait_until(lambda: len(pids(launcher, "decode-0")) == 2, "it is started again")
    hung = pids(launcher, "decode-0")[1]
    kill(hung, signal.SIGSTOP)
    launcher.wait_for("decode-0 hangs in its start for 3 s: killed", 30)
    assert complete(url, PROMPT, 3) == expected_tokens(PROMPT, 3)
    assert not alive(hung)
    assert restarts(url) == 2
    assert "prefill-0 hangs" not in launcher.output, "one that is ready may be as idle as it likes"


def test_a_crash_loop_is_given_up_and_ends_the_launcher_when_a_role_is_gone(
    launch: Launch, fake_folder: Path
) -> None:
    flags = (f"--model={fake_folder}", "--port=0", "--disagg_topo=1,1", "--restart_wait_s=0.01")
    launcher = launch(*HEXSERVE, "serve", *flags)
    launcher.ready_url()
    (fake_folder / "config.json").write_text("{}")
    kill(launcher.worker_pid("decode-0"))
    assert launcher.exit_code() == 1
    assert len(pids(launcher, "decode-0")) == 1 + MOST_FAILED_STARTS
    assert "hexserve: no decode worker is left; the last: decode-0 has ended with code 2" in (
        launcher.output
    )
    assert "Traceback" not in launcher.output


def test_a_deployment_goes_on_without_prefill_workers_where_decode_workers_may_prefill(
    launch: Launch, fake_folder: Path
) -> None:
    flags = ("--port=0", "--disagg_topo=1,1", "--restart_wait_s=0.01", "--decode_may_prefill")
    launcher = launch(*HEXSERVE, "serve", f"--model={fake_folder}", *flags)
    url = launcher.ready_url()
    (fake_folder / "config.json").write_text("{}")
    kill(launcher.worker_pid("prefill-0"))
    launcher.wait_for("prefill-0 is given up", 60)
    assert complete(url, PROMPT, 3) == expected_tokens(PROMPT, 3)
    assert get(url, "/ping").status_code == 200
