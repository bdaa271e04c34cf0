"""Router and workers started one by one, as in pods: over TCP and over Unix sockets."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.deploy.conftest import Launch
from tests.deploy.launch import (
    STOP_S,
    Launched,
    complete,
    completion_body,
    expected_tokens,
    get,
    kill,
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


class Request:
    """A completion with a prompt of many chunks, asked for on a thread."""

    PROMPT = PROMPT * 5000

    def __init__(self, url: str) -> None:
        self.answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(url,), daemon=True)
        self._thread.start()

    def _ask(self, url: str) -> None:
        body = completion_body(self.PROMPT, 5)
        url = f"{url}/v1/completions"
        with contextlib.suppress(httpx.TransportError):
            self.answer = httpx.post(url, json=body, timeout=30, trust_env=False)

    def end(self, timeout_s: float) -> httpx.Response:
        self._thread.join(timeout_s)
        assert self.answer is not None, f"no answer within {timeout_s} s"
        return self.answer

    def failed(self, timeout_s: float) -> bool:
        """The connection has ended without an answer."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.answer is None


def test_a_router_that_is_killed_beside_another_leaves_nothing(
    launch: Launch, scratch: Path
) -> None:
    addresses = [f"unix:{scratch}/{name}.sock" for name in ("p", "d")]
    prefill = launch(*module("prefill_worker", f"--address={addresses[0]}"))
    decode = launch(*module("decode_worker", f"--address={addresses[1]}"))
    flags = f"--workers={','.join(addresses)}", "--port=0"
    routers = [launch(*module("router", *flags)) for _ in range(2)]
    urls = [listening_url(router) for router in routers]
    for url in urls:
        wait_until(lambda url=url: get(url, "/ping").status_code == 200, "both workers are known")
        assert complete(url, PROMPT, 5) == expected_tokens(PROMPT, 5)

    def blocks(number: int, state: str) -> int:
        worker = get(urls[1], "/health").json()["workers"][number]
        return int(worker["blocks"][state])

    total = blocks(0, "total")
    kill(decode.pid, signal.SIGSTOP)  # what has been computed waits to be fetched
    lost = Request(urls[0])
    each = -(-len(Request.PROMPT) // 32)
    wait_until(lambda: blocks(0, "exported") == each, "the KV of one request waits")
    kept = Request(urls[1])
    wait_until(lambda: blocks(0, "exported") == 2 * each, "that of both waits")
    routers[0].stop(signal.SIGKILL)
    wait_until(lambda: blocks(0, "exported") == each, "that of the dead router's is freed")
    kill(decode.pid, signal.SIGCONT)
    answer = kept.end(10).json()["choices"][0]
    assert answer["token_ids"] == expected_tokens(Request.PROMPT, 5)
    for number in range(2):
        wait_until(lambda number=number: blocks(number, "free") == total, "all is free")
    assert lost.failed(10)
    for process in (routers[1], prefill, decode):
        assert process.stop() < STOP_S


@pytest.mark.parametrize(
    ("transport", "victim"),
    [("shm", "prefill"), ("shm", "decode"), ("jax", "prefill"), ("grpc", "decode")],
)
def test_a_worker_that_is_killed_in_a_transfer_leaves_nothing_and_is_used_again(
    launch: Launch, scratch: Path, transport: str, victim: str
) -> None:
    addresses = {role: f"unix:{scratch}/{role}.sock" for role in ("prefill", "decode")}

    def start(role: str) -> Launched:
        flags = f"--address={addresses[role]}", f"--kv_transports={transport}"
        return launch(*module(f"{role}_worker", *flags))

    def blocks(role: str) -> dict[str, int]:
        workers = get(url, "/health").json()["workers"]
        (worker,) = [w for w in workers if w["address"] == addresses[role]]
        found: dict[str, int] = worker.get("blocks", {})
        return found

    def completed(role: str) -> float:
        series = f'completed_total.*role="{role}",transport="{transport}"}} (.*)'
        found = re.search(series, get(url, "/metrics").text)
        return float(found[1]) if found else 0

    router = launch(*module("router", f"--workers={','.join(addresses.values())}", "--port=0"))
    url = listening_url(router)
    workers = {role: start(role) for role in addresses}
    wait_until(lambda: get(url, "/ping").status_code == 200, "both are known")
    assert complete(url, PROMPT, 5) == expected_tokens(PROMPT, 5)
    for role in addresses:
        wait_until(lambda role=role: completed(role) == 1, "it is counted", 2)

    kill(workers["decode"].pid, signal.SIGSTOP)  # it is sent the order and does not read it
    request = Request(url)
    wait_until(lambda: blocks("prefill")["exported"] > 0, "the KV waits to be fetched")
    if victim == "prefill":
        kill(workers["decode"].pid, signal.SIGCONT)
    workers[victim].stop(signal.SIGKILL)
    (other,) = workers.keys() - {victim}
    wait_until(lambda: blocks(other)["free"] == blocks(other)["total"], "its blocks are free", 2)
    start(victim)
    answer = request.end(timeout_s=30)  # it has waited for the new one
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected_tokens(Request.PROMPT, 5)
    assert complete(url, PROMPT, 5) == expected_tokens(PROMPT, 5)
    for role in addresses:
        wait_until(lambda role=role: completed(role) >= 2, "both are counted", 2)
