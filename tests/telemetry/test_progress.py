"""Progress of bytes, told by any thread: lines for a log, a bar at a terminal."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from settings.config import GIB
from telemetry import progress
from telemetry.progress import byte_progress

log = logging.getLogger("hexserve.test")


class Clock:
    """time.monotonic, as far as a test has come."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == log.name]


def test_lines_tell_bytes_and_rate_now_and_then(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, log.name), byte_progress(8 * GIB, "weights", log) as told:
        told(GIB)
        clock.now += progress.LINE_EVERY_S + 1
        told(2 * GIB)
        told(GIB)
        clock.now += progress.LINE_EVERY_S + 1
        told(2 * GIB)
    assert lines_of(caplog) == [
        "weights: 3.00 of 8.00 GiB, 0.50 GiB/s",
        "weights: 6.00 of 8.00 GiB, 0.50 GiB/s",
    ]


def test_many_threads_may_tell(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, log.name), byte_progress(GIB, "weights", log) as told:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(told, [2**20] * 1023))
        clock.now += 8
        told(2**20)
    assert lines_of(caplog) == ["weights: 1.00 of 1.00 GiB, 0.12 GiB/s"]


def test_a_terminal_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with byte_progress(4 * GIB, "weights", log) as told:
        told(GIB)
    shown = capsys.readouterr().err
    assert "weights" in shown
    assert "1.0/4.0 GiB" in shown
