"""Starts hexserve's processes for tests, reads what they log, and ends them by their ids."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

HEXSERVE = (str(Path(sys.executable).with_name("hexserve")),)
HEX_LLM = (sys.executable, "-m", "hex_llm.server.api_server")
VOCAB_SIZE = 512
"""The fake model's."""
START_S = 60.0
"""Far more than a start takes; a test that waits so long has failed."""
STOP_S = 5.0
"""What the project promises between a signal and the end of every process."""


class Launched:
    """A process of hexserve's and the lines it has written."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """The first match of `pattern` in a line, as soon as it is there."""

        def find() -> re.Match[str] | None:
            return next((m for line in self.lines if (m := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self._ended, timeout_s)
            found = find()
        assert found, f"no line matches {pattern!r}:\n{self.output}"
        return found

    def ready_url(self) -> str:
        return self.wait_for(r"ready at (https?://\S+)")[1]

    def worker_pid(self, name: str) -> int:
        return int(self.wait_for(rf"{name}: process (\d+)")[1])

    def exit_code(self, timeout_s: float = START_S) -> int:
        """Wait for the end of the process and of its output."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def stop(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Send a signal; returns the seconds until the process had ended."""
        began = time.monotonic()
        self.process.send_signal(number)
        self.exit_code()
        return time.monotonic() - began

    def end(self) -> None:
        """Kill what is left of the process and its children, and close the pipe."""
        if self.process.poll() is None:
            for pid in (*children(self.pid), self.pid):
                kill(pid)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def shared_memory_files(pid: int) -> set[Path]:
    """Files in /dev/shm that a process has mapped or open."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {Path(match) for match in re.findall(r"/dev/shm/\S+", maps)}


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not after {timeout_s:.0f} s: {what}"
        time.sleep(0.02)


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The fake model's answer, by hand: engine.fake.next_token with a running sum."""
    total = sum((i + 1) * token for i, token in enumerate(prompt))
    answer = []
    for i in range(len(prompt), len(prompt) + count):
        answer.append(total % VOCAB_SIZE)
        total += (i + 1) * answer[-1]
    return answer


def completion_body(prompt: Sequence[int], count: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "max_tokens": count,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def complete(url: str, prompt: Sequence[int], count: int, **more: Any) -> list[int]:
    """Token ids of a completion."""
    body = completion_body(prompt, count, **more)
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", timeout=10, trust_env=False)
