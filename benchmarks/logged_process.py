"""A process that a benchmark starts and ends, with its output in a file."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from settings.environment import child_environment

POLL_S = 0.05
_STOP_S = 5.0
_LAST_LINES = 15


class StartError(Exception):
    """A process did not come up; the message has its last lines."""


class LoggedProcess:
    """A command run as a process, with its output in a file.

    Args:
        name: what messages call it.
        environment: variables added to this process's own.

    Raises:
        StartError: there is no such program, or it may not be run.
    """

    def __init__(
        self, log: Path, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._name = name
        self._log = log
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=child_environment(environment),
                    start_new_session=True,  # a terminal's Ctrl-C is for the benchmark alone
                )
            except OSError as error:
                raise StartError(f"{name} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

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
            time.sleep(POLL_S)

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
            os.killpg(self.pid, signal.SIGKILL)  # what it has started shares its session
            self._process.wait()


@contextlib.contextmanager
def running_command(
    log: Path, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[LoggedProcess]:
    """A process that is ended with the block. Raises and takes what LoggedProcess does."""
    process = LoggedProcess(log, name, command, environment or {})
    try:
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def running_module(log: Path, module: str, *arguments: str) -> Iterator[LoggedProcess]:
    """A Python module run as a process that is ended with the block."""
    with running_command(log, module, [sys.executable, "-m", module, *arguments]) as process:
        yield process
