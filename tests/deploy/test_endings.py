"""How a deployment ends: signals at bad moments, killed launchers, killed workers."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.conftest import Launch
from tests.deploy.launch import (
    HEXSERVE,
    STOP_S,
    alive,
    completion_body,
    expected_tokens,
    get,
    kill,
    wait_until,
)

PROMPT = [3, 1, 4, 1, 5]
SERVE = (*HEXSERVE, "serve", "--model=fake", "--port=0")
LONG = 60_000
"""Tokens that take the fake model far longer than any grace time."""


class Stream:
    """A client that reads a long completion on a thread until it ends, well or not."""

    def __init__(self, url: str) -> None:
        self.tokens: list[int] = []
        self.error: str | None = None
        self.began = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        body = completion_body(PROMPT, LONG, stream=True)
        try:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body, timeout=30, trust_env=False
            ) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            self.error = event["error"]["code"]
                        else:
                            self.tokens += event["choices"][0]["token_ids"]
                        self.began.set()
        except httpx.HTTPError:
            pass  # the server has ended the connection

    def ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def test_a_client_that_streams_does_not_hold_up_the_end(launch: Launch, scratch: Path) -> None:
    launcher = launch(*SERVE, "--disagg_topo=1,1", "--drain_timeout_s=0.5")
    stream = Stream(launcher.ready_url())
    assert stream.began.wait(30)
    assert launcher.stop(signal.SIGTERM) < STOP_S
    assert launcher.exit_code() == 0
    assert stream.ended(STOP_S)
    assert stream.error == "unavailable"
    assert 0 < len(stream.tokens) < LONG
    assert stream.tokens == expected_tokens(PROMPT, len(stream.tokens))
    assert list(scratch.iterdir()) == []
    assert "Traceback" not in launcher.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_workers_start_ends_them(
    launch: Launch, scratch: Path, number: signal.Signals
) -> None:
    launcher = launch(*SERVE, "--disagg_topo=1,1")
    pids = [launcher.worker_pid(name) for name in ("prefill-0", "decode-0")]
    assert launcher.stop(number) < STOP_S
    assert launcher.exit_code() == 0
    assert not [pid for pid in pids if alive(pid)]
    assert list(scratch.iterdir()) == []
    assert "Traceback" not in launcher.output


@pytest.fixture
def silent_hub() -> Iterator[tuple[str, threading.Event]]:
    """The address of a server that takes connections and never answers; set at the first one."""
    asked, taken = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take() -> None:
            try:
                while True:
                    taken.append(listener.accept()[0])
                    asked.set()
            except OSError:
                return  # closed

        thread = threading.Thread(target=take)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in taken:
        connection.close()


@pytest.mark.parametrize(
    "command",
    [(*HEXSERVE, "serve"), (*HEXSERVE, "demo"), ("python", "-m", "router", "--workers=h:1")],
    ids=["serve", "demo", "router"],
)
def test_a_signal_while_the_model_is_fetched_ends_the_process(
    launch: Launch, silent_hub: tuple[str, threading.Event], command: tuple[str, ...]
) -> None:
    endpoint, asked = silent_hub
    interpreter = str(Path(HEXSERVE[0]).with_name("python"))
    process = launch(
        *(interpreter if word == "python" else word for word in command),
        "--model=owner/name",
        "--port=0",
        HF_ENDPOINT=endpoint,
        HF_HUB_OFFLINE="0",
    )
    assert asked.wait(30), process.output
    assert process.stop(signal.SIGTERM) < STOP_S
    assert process.exit_code() == 0
    assert "Traceback" not in process.output


LEAVING = """
import subprocess, sys, threading
from deploy.signals import leave

child = []
def download():
    child.append(subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL))
    started.set()
    child[0].wait()

started = threading.Event()
threading.Thread(target=download, daemon=True).start()
started.wait()
print("child", child[0].pid, flush=True)
sys.stdin.read()
leave(3)
"""


def test_leaving_ends_what_a_thread_has_started(launch: Launch) -> None:
    process = launch(sys.executable, "-c", LEAVING)
    child = int(process.wait_for(r"child (\d+)")[1])
    assert process.exit_code() == 3
    wait_until(lambda: not alive(child), "the child has ended", STOP_S)


@pytest.mark.parametrize("entry", ["main(['serve'])", "serve_main([], as_hex_llm=True)"])
def test_ctrl_c_before_anything_listens_for_it_is_no_traceback(launch: Launch, entry: str) -> None:
    code = (
        "import signal, deploy.cli as cli\n"
        "cli.quiet_grpc = lambda: signal.raise_signal(signal.SIGINT)\n"
        f"cli.{entry}"
    )
    process = launch(sys.executable, "-c", code)
    assert process.exit_code() == 130
    assert process.output == ""


def test_nothing_outlives_a_launcher_that_is_killed(launch: Launch, scratch: Path) -> None:
    """Not even a worker that is stopped, and no sockets."""
    launcher = launch(*SERVE, "--disagg_topo=1,1")
    launcher.ready_url()
    pids = [launcher.worker_pid(name) for name in ("prefill-0", "decode-0")]
    kill(pids[1], signal.SIGSTOP)
    launcher.process.kill()
    wait_until(lambda: not any(alive(pid) for pid in pids), "both workers have ended", STOP_S)
    assert list(scratch.iterdir()) == []


def test_a_second_signal_ends_the_drain(launch: Launch) -> None:
    launcher = launch(*SERVE)
    url = launcher.ready_url()
    stream = Stream(url)
    assert stream.began.wait(30)
    launcher.process.send_signal(signal.SIGTERM)
    wait_until(lambda: get(url, "/ping").status_code == 503, "it drains")
    assert get(url, "/health").json()["state"] == "draining"
    body = completion_body(PROMPT, 3)
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=10, trust_env=False)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert not stream.ended(0)
    assert launcher.stop(signal.SIGTERM) < STOP_S
    assert launcher.exit_code() == 0
    assert stream.ended(STOP_S)
    assert stream.tokens == expected_tokens(PROMPT, len(stream.tokens))
