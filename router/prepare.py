"""From a request's JSON object to a sequence that can be generated and the answer's shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from router.answers import Answer, ChatAnswer, CompletionAnswer
from router.chat_request import ChatRequest, read_chat
from router.completion_request import CompletionRequest, read_completion
from router.context import GatewayContext
from router.fields import Fields
from router.output import Piece, join
from router.prompts import chat_tokens, completion_tokens
from router.sampling import RequestOptions
from router.sequence import TextSequence

_Request = TypeVar("_Request", ChatRequest, CompletionRequest)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked and tokenized request; nothing has gone to a worker yet."""

    sequence: TextSequence
    answer: Answer
    options: RequestOptions

    async def whole(self) -> Piece:
        """Generate the whole output.

        Raises:
            ServingError: as the generator does.
        """
        return join([piece async for piece in self.sequence.pieces()])


async def prepare_completion(
    context: GatewayContext, fields: Fields, *, public_id: str, arrived: float
) -> PreparedRequest:
    """Check and tokenize a completion request.

    Raises:
        ServingError: the server is not ready, or the request cannot be served.
    """
    return await _prepare(
        context,
        fields,
        read=read_completion,
        tokenize=completion_tokens,
        prompt_field="prompt",
        answer=CompletionAnswer,
        public_id=public_id,
        arrived=arrived,
    )


async def prepare_chat(
    context: GatewayContext, fields: Fields, *, public_id: str, arrived: float
) -> PreparedRequest:
    """Check and tokenize a chat request.

    Raises:
        ServingError: the server is not ready, or the request cannot be served.
    """
    return await _prepare(
        context,
        fields,
        read=read_chat,
        tokenize=chat_tokens,
        prompt_field="messages",
        answer=ChatAnswer,
        public_id=public_id,
        arrived=arrived,
    )


async def _prepare(
    context: GatewayContext,
    fields: Fields,
    *,
    read: Callable[..., _Request],
    tokenize: Callable[[GatewayContext, _Request], Awaitable[list[int]]],
    prompt_field: str,
    answer: type[Answer],
    public_id: str,
    arrived: float,
) -> PreparedRequest:
    limits = context.ready_limits()
    request = read(
        fields,
        model=context.resolve_model(fields.raw("model")),
        limits=limits,
        defaults=context.generation_defaults,
        seeds=context.seeds,
    )
    options = request.options
    prompt = await tokenize(context, request)
    sampling = options.fit(
        len(prompt), limits.max_model_len, prompt_param=fields.param(prompt_field)
    )
    return PreparedRequest(
        TextSequence(context, prompt, sampling, options, arrived=arrived),
        answer(
            context.tokenizer,
            public_id=public_id,
            model=options.model,
            prompt=prompt,
            logprobs=options.sampling.top_logprobs is not None,
            return_token_ids=options.return_token_ids,
            usage_in_chunks=options.include_usage,
        ),
        options,
    )
