"""Prediction requests of Vertex AI and of Hex-LLM's clients: `/generate`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from router import choices
from router.answers import DONE_EVENT, encode_json, event
from router.body import read_object
from router.context import GatewayContext
from router.disconnect import cancelled_on_disconnect
from router.errors import BadRequest, ServingError
from router.event_stream import EventStream
from router.fields import Fields, show
from router.openai_api import respond
from router.output import Piece
from router.prepare import PreparedRequest, prepare_chat, prepare_completion
from router.record import RequestRecord
from router.request_log import record_of

MAX_INSTANCES = 256
CHAT_FORMAT = "chatCompletions"


async def predict(context: GatewayContext, request: Request) -> Response:
    """Serve a body of instances, or a chat request marked by its `@requestFormat`.

    Raises:
        ServingError: the body is wrong, or one of its instances could not be served.
    """
    record = record_of(request)
    body = await read_object(request, context)
    async with cancelled_on_disconnect(request.receive):
        fields = Fields(body, integral_floats=True)
        if _is_chat(fields):
            _refuse_adapter(fields)
            return await respond(await prepare_chat(context, fields, record))
        instances = _instances(fields)
        if len(instances) == 1 and instances[0].get("stream") is True:
            return await _stream(context, instances[0], record)
        predictions = await _all(context, instances, record)
    listed = b",".join(predictions)
    # One chat instance is answered by its object alone, not by a list of it.
    if len(instances) > 1 or instances[0].get("@requestFormat") is None:
        listed = b"[" + listed + b"]"
    return Response(b'{"predictions":' + listed + b"}", media_type="application/json")


def _instances(fields: Fields) -> list[dict[str, Any]]:
    """The instances, each with the body's `parameters` where it does not say otherwise."""
    instances = fields.raw("instances")
    if not isinstance(instances, list) or not instances:
        raise BadRequest(
            f"instances must be a list of at least one object, got {show(instances)}",
            param="instances",
        )
    if len(instances) > MAX_INSTANCES:
        raise BadRequest(
            f"instances has {len(instances)} items, the limit is {MAX_INSTANCES}",
            param="instances",
        )
    for number, instance in enumerate(instances):
        if not isinstance(instance, dict):
            param = f"instances[{number}]"
            raise BadRequest(f"{param} must be an object, got {show(instance)}", param=param)
    parameters = fields.raw("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise BadRequest(
            f"parameters must be an object, got {show(parameters)}", param="parameters"
        )
    fields.finish()
    return [{**parameters, **instance} for instance in instances]


async def _all(
    context: GatewayContext, instances: list[dict[str, Any]], record: RequestRecord
) -> list[bytes]:
    """The JSON of all predictions in order, computed at once; the first failure ends the others."""
    room = asyncio.Semaphore(choices.MAX_AT_ONCE)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_one(context, instance, number, record, room))
                for number, instance in enumerate(instances)
            ]
    except* ServingError as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        failure = first
    else:
        return [task.result() for task in tasks]
    raise failure


async def _one(
    context: GatewayContext,
    instance: dict[str, Any],
    number: int,
    record: RequestRecord,
    room: asyncio.Semaphore,
) -> bytes:
    fields = Fields(instance, prefix=f"instances[{number}].", integral_floats=True)
    fields.only("stream", [False], "only the single instance of a body can be streamed")
    _refuse_adapter(fields)
    if _is_chat(fields):
        answer_id = f"{record.id}-{number}"
        prepared = await prepare_chat(context, fields, record, answer_id=answer_id)
        return await prepared.whole(room)
    prepared, head = await _prepare_text(context, fields, record)
    (output,) = await prepared.choices.whole(room)
    return encode_json(head + output.text).encode()


async def _stream(
    context: GatewayContext, instance: dict[str, Any], record: RequestRecord
) -> Response:
    fields = Fields(instance, prefix="instances[0].", integral_floats=True)
    _refuse_adapter(fields)
    if _is_chat(fields):
        return await respond(await prepare_chat(context, fields, record))
    prepared, head = await _prepare_text(context, fields, record)
    return await EventStream.begin(prepared.choices, PredictionStream(head))


class PredictionStream:
    """A prediction of text as events: `{"predictions": ["piece"]}`; see StreamedAnswer.

    The pieces joined are the prediction that is not streamed, `head` included.
    """

    usage_in_pieces = False

    def __init__(self, head: str) -> None:
        self._head = head

    def first_events(self, number: int, piece: Piece, usage: dict[str, object] | None) -> bytes:
        return event({"predictions": [self._head + piece.text]})

    def piece_event(self, number: int, piece: Piece, usage: dict[str, object] | None) -> bytes:
        return event({"predictions": [piece.text]})

    def last_events(self, usage: dict[str, object]) -> bytes:
        return DONE_EVENT

    def error_event(self, error: ServingError) -> bytes:
        return event(error.body())


async def _prepare_text(
    context: GatewayContext, fields: Fields, record: RequestRecord
) -> tuple[PreparedRequest, str]:
    """A prediction of text, and what stands before its output."""
    raw_response = fields.flag("raw_response")
    fields.only("logprobs", [], "the answer is plain text; use /v1/completions")
    fields.only("return_token_ids", [False], "the answer is plain text; use /v1/completions")
    prompt = fields.raw("prompt")
    if not raw_response and not isinstance(prompt, str):
        param = fields.param("prompt")
        raise BadRequest(
            f"{param} must be a string unless raw_response is true, got {show(prompt)}",
            param=param,
        )
    fields.only("n", [1], "an instance has one prediction")
    fields.only("best_of", [1], "an instance has one prediction")
    fields.only("echo", [False], "the answer has the prompt unless raw_response is true")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        param = fields.param("prompt")
        raise BadRequest(f"{param} must be one prompt, got {show(prompt)}", param=param)
    prepared = await prepare_completion(context, fields, record)
    return prepared, "" if raw_response else f"Prompt:\n{prompt}\nOutput:\n"


def _refuse_adapter(fields: Fields) -> None:
    fields.only("dynamic-lora", [""], "adapters cannot be loaded")


def _is_chat(fields: Fields) -> bool:
    kind = fields.raw("@requestFormat")
    if kind is None:
        return False
    if kind != CHAT_FORMAT:
        param = fields.param("@requestFormat")
        raise BadRequest(f'{param} must be "{CHAT_FORMAT}", got {show(kind)}', param=param)
    return True
