"""What counts as a sign of life of a worker that is starting."""

from __future__ import annotations

import os

import pytest

from deploy import start_watch
from deploy.start_watch import StartWatch, cpu_seconds


class Clocks:
    """The time, and what the process has used of a core."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu_s = 0.0
        patch.setattr(start_watch.time, "monotonic", lambda: self.now)
        patch.setattr(start_watch, "cpu_seconds", lambda _: self.cpu_s)


@pytest.mark.parametrize(
    ("line", "cpu_s", "hangs"),
    [(0, 0.0, True), (0, 0.01, True), (1, 0.0, False), (0, 0.5, False)],
    ids=["nothing", "an idle loop", "a line", "work"],
)
def test_a_start_hangs_without_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch, line: int, cpu_s: float, hangs: bool
) -> None:
    clocks = Clocks(monkeypatch)
    watch = StartWatch(1, limit_s=10.0)
    answers = []
    for number in range(1, 21):  # twice the limit
        clocks.now += 1.0
        clocks.cpu_s += cpu_s
        answers.append(watch.hangs(line * number))
    assert any(answers) == hangs
    assert not any(answers[:9])


def test_the_processor_time_is_that_of_the_process() -> None:
    before = cpu_seconds(os.getpid())
    assert before > 0
    assert abs(before - sum(os.times()[:2])) < 1.0
    assert cpu_seconds(2**22 + 1) == 0.0
