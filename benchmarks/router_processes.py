"""The two processes under test: a paced worker, and the router that a user would start."""

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import httpx

_START_S = 60.0
"""Far more than a start takes."""
_STOP_S = 5.0
_LAST_LINES = 15
_POLL_S = 0.05


class StartError(Exception):
    """A process did not come up; the message has its last lines."""


class LoggedProcess:
    """A Python module run as a process, with its output in a file."""

    def __init__(self, log: Path, module: str, arguments: Sequence[str]) -> None:
        self._name = module
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for the benchmark alone
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def check(self, deadline: float) -> None:
        """Raises StartError when the process has ended, or the monotonic deadline is over."""
        code = self._process.poll()
        if code is None and time.monotonic() < deadline:
            return
        ending = f"has ended with code {code}" if code is not None else "does not become ready"
        lines = "\n".join(f"    {line}" for line in self.output.splitlines()[-_LAST_LINES:])
        raise StartError(f"{self._name} {ending}; its last lines:\n{lines}")

    def wait_for(self, text: str, deadline: float) -> None:
        """Until its output holds `text`. Raises StartError as `check` does."""
        while text not in self.output:
            self.check(deadline)
            time.sleep(_POLL_S)

    def fail(self) -> NoReturn:
        """Raises StartError as `check` does, of a process whose end is seen elsewhere already."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self.check(time.monotonic())
        raise AssertionError("the deadline is over")

    def end(self) -> None:
        """Close its standard input and send SIGTERM; SIGKILL if it is still there later."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def running_module(log: Path, module: str, *arguments: str) -> Iterator[LoggedProcess]:
    """A process that is ended with the block."""
    process = LoggedProcess(log, module, arguments)
    try:
        yield process
    finally:
        process.end()


@contextlib.asynccontextmanager
async def running_router(
    folder: Path, stamps: Path, address: str, interval: float
) -> AsyncIterator[str]:
    """A paced worker at `address` and a router that has found it; yields the router's URL.

    Args:
        folder: where their output goes.
        stamps, interval: see benchmarks.paced_worker.

    Raises:
        StartError: one of them does not come up.
    """
    with (
        running_module(
            folder / "worker.log",
            "benchmarks.paced_worker",
            f"--address={address}",
            f"--stamps={stamps}",
            f"--interval={interval}",
        ) as worker,
        running_module(
            folder / "router.log",
            "router",
            "--model=fake",
            f"--workers={address}",
            "--host=127.0.0.1",
            "--port=0",
        ) as router,
    ):
        yield await _ready_url(worker, router)


async def _ready_url(worker: LoggedProcess, router: LoggedProcess) -> str:
    deadline = time.monotonic() + _START_S
    async with httpx.AsyncClient(trust_env=False, timeout=_START_S) as http:
        while True:
            worker.check(deadline)
            router.check(deadline)
            if found := re.search(r"listening at (http://\S+),", router.output):
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"{found[1]}/ping")).status_code == 200:
                        return found[1]
            await asyncio.sleep(_POLL_S)
