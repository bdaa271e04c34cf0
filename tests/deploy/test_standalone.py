"""Router and workers started one by one, as in pods: over TCP and over Unix sockets."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.deploy.conftest import Launch
from tests.deploy.launch import (
    STOP_S,
    Launched,
    complete,
    expected_tokens,
    get,
    wait_until,
)

PROMPT = [9, 8, 7]


def module(name: str, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, "--model=fake", *flags)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def listening_url(router: Launched) -> str:
    return router.wait_for(r"listening at (http://\S+), 2 workers are listed")[1]


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
def test_a_router_finds_its_workers_when_they_come(
    launch: Launch, scratch: Path, scheme: str
) -> None:
    if scheme == "tcp":
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    else:
        addresses = [f"unix:{scratch}/{name}.sock" for name in ("p", "d")]
    router = launch(*module("router", f"--workers={','.join(addresses)}", "--port=0"))
    url = listening_url(router)
    for path in ("/health", "/ping"):
        assert get(url, path).status_code == 503

    prefill = launch(*module("prefill_worker", f"--address={addresses[0]}"))
    prefill.wait_for("prefill worker ready")
    wait_until(
        lambda: get(url, "/health").json()["workers"][0]["state"] == "ready", "prefill is known"
    )
    for path in ("/health", "/ping"):
        assert get(url, path).status_code == 503, "half a deployment serves nothing"

    decode = launch(*module("decode_worker", f"--address={addresses[1]}"))
    wait_until(lambda: get(url, "/ping").status_code == 200, "both are known")
    assert get(url, "/ping").content == b""
    assert get(url, "/health").json()["workers"][1]["roles"] == ["decode"]
    assert complete(url, PROMPT * 50, 30) == expected_tokens(PROMPT * 50, 30)

    for process, number in (
        (decode, signal.SIGTERM),
        (prefill, signal.SIGINT),
        (router, signal.SIGTERM),
    ):
        assert process.stop(number) < STOP_S
        assert process.exit_code() == 0, process.output
        assert "Traceback" not in process.output
    assert list(scratch.iterdir()) == []


def test_a_worker_that_comes_back_is_used_again(launch: Launch, scratch: Path) -> None:
    addresses = [f"unix:{scratch}/{name}.sock" for name in ("p", "d")]
    router = launch(*module("router", f"--workers={','.join(addresses)}", "--port=0"))
    url = listening_url(router)
    launch(*module("prefill_worker", f"--address={addresses[0]}"))
    first = launch(*module("decode_worker", f"--address={addresses[1]}"))
    wait_until(lambda: get(url, "/ping").status_code == 200, "both are known")
    first.stop(signal.SIGKILL)
    wait_until(lambda: get(url, "/ping").status_code == 503, "the loss is known")
    launch(*module("decode_worker", f"--address={addresses[1]}"))
    wait_until(lambda: get(url, "/ping").status_code == 200, "the new one is known")
    assert complete(url, PROMPT, 5) == expected_tokens(PROMPT, 5)
