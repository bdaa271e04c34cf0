"""The API's description: OpenAPI 3.1, written by hand, as the bodies are checked by hand.

Tests hold it to what the application does.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from router import answer_schemas as answers
from router import request_schemas as requests
from router.context import ANY_MODEL, GatewayContext

Schema = dict[str, Any]

_ERRORS = {
    400: "The request can never be served as it is; the error names the field.",
    401: "An API key is wanted.",
    403: "A web page has sent this.",
    404: "No such model.",
    405: "Another method is wanted; Allow names it.",
    408: "The body did not arrive in time, or the request's deadline_ms has passed.",
    413: "The body is too large.",
    429: "No room for more requests; try again after Retry-After seconds.",
    500: "The request was taken and then lost.",
    503: "Not ready: loading, draining, or no worker is left; try again after Retry-After seconds.",
}
_HEADERS = {
    401: ("WWW-Authenticate", "Bearer"),
    405: ("Allow", "The methods that there are."),
    429: ("Retry-After", "Seconds to wait before the next try."),
    503: ("Retry-After", "Seconds to wait before the next try."),
}
_ASKED = (400, 401, 404, 405, 408, 413, 429, 500, 503)
_LISTED = (401, 405, 429)


def describe(context: GatewayContext) -> Schema:
    """The description of an application with this context."""
    names = list(context.served_model_names)
    predict = _post(
        "Serve the instances of a prediction, or a chat marked by its @requestFormat",
        "Prediction", streams=True,
    )  # fmt: skip
    ping = _get("Tell whether requests can be served", None, (405, 503))
    paths: Schema = {
        "/v1/completions": _post("Continue one or more prompts", "Completion", streams=True),
        "/v1/chat/completions": _post("Answer a conversation", "Chat", streams=True),
        "/v1/responses": _post(
            "Answer a conversation in the shape of the responses API; nothing is stored",
            "Response", streams=True,
        ),
        "/v1/models": _get("List the served model under each of its names", "Models", _LISTED),
        "/v1/models/{name}": _get("Describe one served model", "Model", (404, *_LISTED)),
        "/tokenize": _post("Give the token ids of a text or a conversation", "Tokenize"),
        "/detokenize": _post("Give the text of token ids", "Detokenize"),
        "/version": _get("Tell hexserve's version", "Version", (405,)),
        "/health": _get("Describe the workers", "Health", (405,)),
        "/metrics": _get("Expose the metrics to Prometheus", "Metrics", (405,)),
        "/generate": predict,
        "/ping": ping,
    }  # fmt: skip
    if context.drain_worker is not None:
        drain = _post("Have a worker end when what runs has ended", "Drain")
        responses = drain["post"]["responses"]
        del responses["404"]  # it names no model
        responses["403"] = _answer(403, "Error")
        paths["/admin/drain"] = drain
    paths["/v1/models/{name}"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"enum": names}}
    ]
    paths["/health"]["get"]["responses"]["503"] = _answer(503, "Health")
    paths.setdefault(context.predict_route, predict)
    paths.setdefault(context.health_route, ping)
    schemas: Schema = {
        requests.MODEL_NAME: {"enum": [*names, *ANY_MODEL, None]},
        "Error": answers.ERROR,
        "Event": answers.EVENT,
        "Metrics": {"type": "string"},
        "Version": answers.VERSION,
        "Health": answers.HEALTH,
        "Model": answers.MODEL,
        "Models": answers.MODELS,
    }
    posted = ["Completion", "Chat", "Response", "Prediction", "Tokenize", "Detokenize"]
    if context.drain_worker is not None:
        posted.append("Drain")
    for name in posted:
        schemas[f"{name}Request"] = getattr(requests, name.upper())
        schemas[name] = getattr(answers, name.upper())
    description: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "hexserve", "version": version("hexserve")},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if context.api_keys:
        description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"key": []}]
        for path in ("/version", "/health", "/metrics", "/ping", context.health_route):
            paths[path] = {"get": {**paths[path]["get"], "security": []}}
    return description


def _get(summary: str, answer: str | None, errors: tuple[int, ...]) -> Schema:
    return {"get": {"summary": summary, "responses": _responses(answer, errors)}}


def _post(summary: str, name: str, *, streams: bool = False) -> Schema:
    body = {
        "required": True,
        "content": {"application/json": {"schema": _ref(f"{name}Request")}},
    }
    responses = _responses(name, _ASKED)
    if streams:
        responses["200"]["content"]["text/event-stream"] = {"schema": _ref("Event")}
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _responses(answer: str | None, errors: tuple[int, ...]) -> Schema:
    responses = {str(code): _answer(code, "Error") for code in errors}
    responses["200"] = _answer(200, answer)
    if answer is None:  # a probe's answers have no body
        responses["503"] = _answer(503, None)
    return responses


def _answer(code: int, name: str | None) -> Schema:
    answer: Schema = {"description": _ERRORS.get(code, "Done")}
    if name is not None:
        kind = "text/plain" if name == "Metrics" else "application/json"
        answer["content"] = {kind: {"schema": _ref(name)}}
    if code in _HEADERS:
        header, meaning = _HEADERS[code]
        answer["headers"] = {
            header: {"description": meaning, "required": True, "schema": {"type": "string"}}
        }
    return answer


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
