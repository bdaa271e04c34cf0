"""Holds an answer to the API's description: no test sees one that is not described."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema_rs


def check_described(
    description: dict[str, Any], method: str, path: str, response: httpx.Response
) -> None:
    """Fail for a status, a kind of content, a body or a header that is not in the description.

    Of paths that are not described nothing is known; OPTIONS is the browsers'.
    """
    path = path.removeprefix("/invoke")
    if path.startswith("/v1/models/"):
        path = "/v1/models/{name}"
    operations = description["paths"].get(path)
    if operations is None or method == "OPTIONS":
        return
    # What another method is answered is told by the one that is there.
    operation = operations.get(method.lower()) or next(
        each for name, each in operations.items() if name != "parameters"
    )
    where, described = f"{method} {path} {response.status_code}", operation["responses"]
    assert str(response.status_code) in described, f"{where} is not described"
    answer = described[str(response.status_code)]
    for header in answer.get("headers", ()):
        assert header in response.headers, f"{where} lacks {header}"
    assert ("Retry-After" in answer.get("headers", ())) is ("retry-after" in response.headers)
    kind = response.headers.get("content-type", "").partition(";")[0]
    assert kind in answer.get("content", {"": {}}), f"{where} has content of type {kind}"
    if kind == "application/json":
        schema = answer["content"][kind]["schema"] | {"components": description["components"]}
        jsonschema_rs.validate(schema, response.json())
