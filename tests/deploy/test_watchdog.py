"""A worker process that hangs ends by itself, and says where it stood."""

from __future__ import annotations

import sys

import pytest

from tests.deploy.conftest import Launch

HANGING = """
import asyncio, ctypes, deploy.watchdog as watchdog

watchdog.LOOP_LIMIT_S, watchdog.BEAT_S = 0.4, 0.05
age = {age}

async def where_it_stands():
    async with watchdog.watchdog(lambda: age, step_limit_s=5.0):
        await asyncio.sleep(0.2)
        {act}
        await asyncio.sleep(60)

asyncio.run(where_it_stands())
"""


@pytest.mark.parametrize(
    ("age", "act", "said"),
    [
        (0.0, "ctypes.PyDLL(None).sleep(60)", "where_it_stands"),  # with the interpreter's lock
        (5.1, "pass", "dump|Thread|thread"),
    ],
    ids=["the loop", "a step"],
)
def test_what_hangs_ends(launch: Launch, age: float, act: str, said: str) -> None:
    process = launch(sys.executable, "-c", HANGING.format(age=age, act=act))
    assert process.exit_code(20) == 1
    process.wait_for(said)


def test_what_does_not_hang_goes_on(launch: Launch) -> None:
    code = HANGING.format(age=1.0, act="await asyncio.sleep(1); return")
    process = launch(sys.executable, "-c", code)
    assert process.exit_code(20) == 0
    assert process.output == ""
