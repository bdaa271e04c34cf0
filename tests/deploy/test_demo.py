"""`hexserve demo`, with the fake model in the demo model's place."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.deploy.conftest import Launch
from tests.deploy.launch import HEXSERVE, STOP_S, alive, complete, expected_tokens

DEMO = (*HEXSERVE, "demo", "--model=fake")


def test_once_ends_after_the_answer(launch: Launch, scratch: Path) -> None:
    demo = launch(*DEMO, "--once")
    assert demo.exit_code() == 0, demo.output
    demo.wait_for(r"1 prefill and 1 decode workers")
    demo.wait_for(r"> What is the capital of France")
    demo.wait_for(r"first text after \d+ ms, then \d+ ms a piece, \d+ pieces")
    assert "Serving at" not in demo.output
    assert "Traceback" not in demo.output
    assert list(scratch.iterdir()) == []


def test_it_goes_on_serving_until_ctrl_c(launch: Launch, scratch: Path) -> None:
    demo = launch(*DEMO, "--disagg_topo=1,2")
    url = demo.wait_for(r"Serving at (http://\S+) until Ctrl-C")[1]
    assert complete(url, [1, 2, 3], 3) == expected_tokens([1, 2, 3], 3)
    pids = [demo.worker_pid(name) for name in ("prefill-0", "decode-0", "decode-1")]
    assert demo.stop(signal.SIGINT) < STOP_S
    assert demo.exit_code() == 0
    assert not [pid for pid in pids if alive(pid)]
    assert list(scratch.iterdir()) == []


def test_a_question_that_cannot_be_answered_is_a_failure(launch: Launch, scratch: Path) -> None:
    demo = launch(*DEMO, "--max_model_len=16")
    assert demo.exit_code() == 1
    demo.wait_for(r"hexserve: 400: .*16")
    assert "Traceback" not in demo.output
    assert list(scratch.iterdir()) == []
