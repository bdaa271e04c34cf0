"""From a request's JSON object to sequences that can be generated and the answer's shape."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from router.answers import ChatAnswer, CompletionAnswer
from router.chat_request import read_chat
from router.choices import Choices
from router.completion_request import read_completion
from router.context import GatewayContext
from router.event_stream import StreamedAnswer
from router.fields import Fields
from router.output import Piece
from router.prompts import chat_tokens, completion_tokens, tokens_text
from router.record import RequestRecord
from router.response_answer import ResponseAnswer
from router.response_request import read_response
from router.sampling import RequestOptions
from router.sequence import TextSequence
from router.siblings import Siblings
from router.whole_answer import answer_bytes

_Request = TypeVar("_Request")


class WholeOrStreamed(StreamedAnswer, Protocol):
    """An answer's shape in either form."""

    def whole(self, outputs: Sequence[Piece], usage: dict[str, object]) -> dict[str, Any]:
        """The answer as one object; `outputs` are the choices in order."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked and tokenized request; nothing has gone to a worker yet."""

    choices: Choices
    answer: WholeOrStreamed
    options: RequestOptions

    async def whole(self, room: asyncio.Semaphore | None = None) -> bytes:
        """Generate everything; the JSON of the answer as one object. `room`: see Choices.pieces.

        Raises:
            ServingError: as the generator does.
        """
        choices = self.choices
        with choices.counted():  # also while the answer is written
            outputs = await choices.whole(room)
            usage = choices.usage()
            listed = choices.prompt_and_output_tokens() if self.options.return_token_ids else 0
            return await answer_bytes(lambda: self.answer.whole(outputs, usage), outputs, listed)


async def prepare_completion(
    context: GatewayContext, fields: Fields, record: RequestRecord
) -> PreparedRequest:
    """Check and tokenize a completion request.

    Raises:
        ServingError: the server is not ready, or the request cannot be served.
    """
    request = _read(context, fields, read_completion)
    prompts = await completion_tokens(context, request)
    options = request.options
    choices = _choices(
        context,
        options,
        prompts,
        record,
        param=fields.param("prompt"),
        candidates=request.candidates,
    )
    echo = None
    if request.echo:  # only now it is known that they are short enough to be decoded
        echo = [
            prompt
            if isinstance(prompt, str)
            else await tokens_text(context, prompt, skip_special_tokens=options.skip_special_tokens)
            for prompt in request.prompts
        ]
    answer = CompletionAnswer(context.tokenizer, options, record.id, prompts=prompts, echo=echo)
    return PreparedRequest(choices, answer, options)


async def prepare_chat(
    context: GatewayContext,
    fields: Fields,
    record: RequestRecord,
    *,
    answer_id: str | None = None,
) -> PreparedRequest:
    """Check and tokenize a chat request.

    `answer_id` names the answer where the record's id would name several.

    Raises:
        ServingError: the server is not ready, or the request cannot be served.
    """
    request = _read(context, fields, read_chat)
    param = fields.param("messages")
    prompt = await chat_tokens(context, request.messages, param)
    options = request.options
    answer = ChatAnswer(context.tokenizer, options, answer_id or record.id, prompt=prompt)
    choices = _choices(context, options, [prompt], record, param=param)
    return PreparedRequest(choices, answer, options)


async def prepare_response(
    context: GatewayContext, fields: Fields, record: RequestRecord
) -> PreparedRequest:
    """Check and tokenize a request of the responses API.

    Raises:
        ServingError: the server is not ready, or the request cannot be served.
    """
    request = _read(context, fields, read_response)
    prompt = await chat_tokens(context, request.messages, "input")
    answer = ResponseAnswer(context.tokenizer, request, record.id)
    choices = _choices(context, request.options, [prompt], record, param="input")
    return PreparedRequest(choices, answer, request.options)


def _read(context: GatewayContext, fields: Fields, read: Callable[..., _Request]) -> _Request:
    limits = context.ready_limits()
    return read(
        fields,
        model=context.resolve_model(fields.raw("model"), fields.param("model")),
        limits=limits,
        defaults=context.generation_defaults,
    )


def _choices(
    context: GatewayContext,
    options: RequestOptions,
    prompts: Sequence[Sequence[int]],
    record: RequestRecord,
    *,
    param: str,
    candidates: int | None = None,
) -> Choices:
    candidates = candidates or options.n
    max_model_len = context.ready_limits().max_model_len
    sequences = []
    for number, prompt in enumerate(map(tuple, prompts)):
        named = param if len(prompts) == 1 else f"{param}[{number}]"
        sampling = options.fit(len(prompt), max_model_len, context.seeds, prompt_param=named)
        if candidates > options.n and sampling.top_logprobs is None:
            sampling = dataclasses.replace(sampling, top_logprobs=0)  # to rank them by
        record.prompt_tokens += len(prompt)
        siblings = Siblings(prompt, candidates) if candidates > 1 else None
        sequences += [
            TextSequence(
                context,
                prompt,
                sampling,
                options,
                record=record,
                choice=choice,
                siblings=siblings,
            )
            for choice in range(candidates)
        ]
    return Choices(sequences, n=options.n, candidates=candidates)
