"""`priority` and `deadline_ms` of a request's body, and what a client reads of a deadline."""

from __future__ import annotations

import time
from typing import Any

import pytest

from router.errors import DeadlinePassed
from router.request_schemas import CHAT, COMPLETION
from router.urgency import MOST_DEADLINE_MS, MOST_PRIORITY, Urgency
from tests.router.conftest import Client
from tests.router.fakes import ScriptedGenerator, batches

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_both_reach_the_generator(
    client: Client, generator: ScriptedGenerator, path: str
) -> None:
    generator.script = batches("ok", 1)
    before = time.monotonic()
    asked = {"priority": -MOST_PRIORITY - 1, "deadline_ms": 60_000}
    assert (await client.post(path, BODIES[path] | asked)).status_code == 200
    (call,) = generator.calls
    assert call.urgency.priority == -MOST_PRIORITY - 1
    assert call.urgency.deadline is not None
    assert before + 60 <= call.urgency.deadline <= time.monotonic() + 60


@pytest.mark.parametrize("fields", [{}, {"priority": None, "deadline_ms": None}])
async def test_neither_is_needed(
    client: Client, generator: ScriptedGenerator, fields: dict[str, Any]
) -> None:
    generator.script = batches("ok", 1)
    await client.complete(**fields)
    assert generator.calls[0].urgency == Urgency()


@pytest.mark.parametrize("path", BODIES)
async def test_a_deadline_that_passes_before_the_answer_is_408(
    client: Client, generator: ScriptedGenerator, path: str
) -> None:
    generator.script = [DeadlinePassed()]
    for stream in (False, True):
        body = BODIES[path] | {"deadline_ms": 5, "stream": stream}
        response = await client.post(path, body)
        assert response.status_code == 408
        error = response.json()["error"]
        assert error["code"] == "deadline_exceeded"
        assert error["param"] == "deadline_ms"
        assert "connection" not in response.headers, "the body has been read"


async def test_in_a_stream_that_has_begun_it_is_the_last_event(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = [[ord("o")], DeadlinePassed()]
    events = await client.stream_completion(deadline_ms=5)
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert [event for event in events if "choices" in event]


async def test_one_that_its_deadline_ended_is_no_error_in_the_metrics(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = [[ord("o")], DeadlinePassed()]
    await client.stream_completion(deadline_ms=5)
    text = (await client.get("/metrics")).text
    for reason, count in (("deadline", 1), ("error", 0)):
        assert f'finished_reason="{reason}",model_name="org/model"}} {count}.0' in text


def test_the_schemas_have_the_limits() -> None:
    for schema in (COMPLETION, CHAT):
        assert schema["properties"]["priority"]["maximum"] == MOST_PRIORITY
        assert schema["properties"]["deadline_ms"]["maximum"] == MOST_DEADLINE_MS
