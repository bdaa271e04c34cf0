"""Each field of each body, with a value of every JSON type that it must not have."""

from __future__ import annotations

from typing import Any

import pytest

from router import request_schemas as schemas
from tests.router.conftest import Client
from tests.router.fakes import ScriptedGenerator
from tests.router.test_bad_input import check_error

VALUES: dict[str, Any] = {
    "boolean": True,
    "integer": 7,
    "number": 1.5,
    "string": "wrong",
    "array": [{}],
    "object": {"wrong": []},
}


def without_prompt(properties: dict[str, Any]) -> dict[str, Any]:
    """Beside messages any prompt is a conflict, whatever its type."""
    return {name: schema for name, schema in properties.items() if name != "prompt"}


CHAT = {"messages": [{"role": "user", "content": "x"}]}
BODIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "p"}, schemas.COMPLETION["properties"]),
    ("/v1/chat/completions", CHAT, schemas.CHAT["properties"]),
    ("/v1/responses", {"input": "x"}, schemas.RESPONSE["properties"]),
    ("/detokenize", {"tokens": [1]}, schemas.DETOKENIZE["properties"]),
    ("/tokenize", {"prompt": "p"}, schemas.TOKENIZE["anyOf"][0]["properties"]),
    ("/tokenize", CHAT, without_prompt(schemas.TOKENIZE["anyOf"][1]["properties"])),
]


def allowed_types(schema: dict[str, Any]) -> set[str]:
    """JSON types that a field may have; none of VALUES is one of an enumeration's."""
    if "enum" in schema:
        return set()
    if "$ref" in schema:
        return {"string"}
    if "anyOf" in schema:
        return {kind for each in schema["anyOf"] for kind in allowed_types(each)}
    kinds = schema.get("type", list(VALUES))
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    return found | {"integer"} if "number" in found else found


@pytest.mark.parametrize(("path", "base", "properties"), BODIES)
async def test_a_value_of_the_wrong_type_is_refused(
    client: Client,
    generator: ScriptedGenerator,
    path: str,
    base: dict[str, Any],
    properties: dict[str, Any],
) -> None:
    tried = 0
    for name, schema in properties.items():
        for kind in VALUES.keys() - allowed_types(schema):
            response = await client.post(path, {**base, name: VALUES[kind]})
            check_error(response, 400)
            param = response.json()["error"]["param"]
            assert param.startswith(name), f"{name} of type {kind}: {param}"
            tried += 1
    assert tried > 2 * len(properties)
    assert generator.calls == []
