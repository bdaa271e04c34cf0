"""Each field of each body, however deep: values that its schema forbids are refused, by name.

What a schema cannot say, such as fields that conflict, is in test_conflicts.py
and test_bad_input.py.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema_rs
import pytest

from router.app import create_app
from router.context import GatewayContext
from router.fields import Fields
from tests.router.bodies import BODIES, Body
from tests.router.conftest import Client
from tests.router.fakes import ScriptedGenerator, batches
from tests.router.schema_cases import HALF_OF_A_PAIR, Schema, Wrong, encoded, wrong_objects

WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "max_tool_calls"),
    *("id", "status", "phase"),  # of an earlier answer that is sent back
}
"""Fields that take anything."""


@pytest.fixture(params=BODIES)
def body(request: pytest.FixtureRequest) -> Body:
    return BODIES[request.param]


@pytest.fixture
def client(context: GatewayContext) -> Client:
    return Client(context).with_context(drain_worker=lambda _: None)


def cases(body: Body, described: Schema) -> list[Wrong]:
    """Those that are wrong in every alternative."""
    whole = {**body.schema, "components": described["components"]}
    validator = jsonschema_rs.validator_for(whole)

    def is_wrong(value: Any) -> bool:
        # The validator cannot be given half of a pair.
        return HALF_OF_A_PAIR in json.dumps(value) or not validator.is_valid(value)

    return [
        case
        for case in wrong_objects(body.schema, body.base)
        if is_wrong(case.value) and case.top != body.instead
    ]


def complaint(body: Body, case: Wrong, response: httpx.Response) -> str | None:
    """What is wrong with an answer to a wrong value, if anything."""
    if response.status_code != 400:
        return f"{response.status_code}"
    error = response.json()["error"]
    field = body.prefix + case.field.removeprefix(".")
    named = error["param"] or ""
    if named == field.removesuffix("tool_calls") + "content":
        return None  # a message wants one of the two
    if not named or not (field.startswith(named) or named.startswith(field)):
        return f"names {named!r}"
    if len(named) <= len(body.prefix) or named.split("[")[0] not in error["message"]:
        return f"names {named!r}"
    lacking = [part for part in case.parts if part not in error["message"]]
    return f"lacks {lacking}: {error['message']}" if lacking else None


async def test_what_a_schema_forbids_is_refused_by_name_value_and_limit(
    client: Client, generator: ScriptedGenerator, body: Body
) -> None:
    app = create_app(client.context)
    found = cases(body, app.openapi())
    covered = {case.top for case in found}
    lacking = set(body.schema["properties"]) - covered - WITHOUT_EFFECT - {body.instead}
    assert not lacking, f"fields without a case: {lacking}"
    complaints = []
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for case in found:
            value = {**case.value}
            if case.field.startswith(".stream_options."):
                value["stream"] = True
            response = await http.post(body.path, content=encoded(body.wrap(value)))
            if wrong := complaint(body, case, response):
                complaints.append(f"{case.field} of {str(case.value)[:120]}: {wrong}")
    assert not complaints, "\n".join(complaints)
    assert len(found) > 2 * len(body.schema["properties"])
    assert generator.calls == []


async def test_a_schema_has_the_fields_that_are_read(
    client: Client, generator: ScriptedGenerator, body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so each of them has cases above. null stands for an absent one."""
    generator.script = batches("x")
    taken: dict[str, set[str]] = {}
    finish = Fields.finish

    def noted(fields: Fields) -> None:
        taken[fields._prefix] = fields._taken
        finish(fields)

    monkeypatch.setattr(Fields, "finish", noted)
    absent = dict.fromkeys(body.schema["properties"])
    response = await client.post(body.path, body.wrap(absent | body.base))
    assert response.status_code == 200, response.text
    assert taken[body.prefix] == set(body.schema["properties"])
