"""From a request's JSON object to a sequence that can be generated and the answer's shape."""

from __future__ import annotations

from dataclasses import dataclass

from router.answers import Answer, ChatAnswer, CompletionAnswer
from router.chat_request import read_chat
from router.completion_request import read_completion
from router.context import GatewayContext
from router.fields import Fields
from router.output import Piece, join
from router.prompts import chat_tokens, completion_tokens
from router.sampling import RequestOptions
from router.sequence import TextSequence


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
    limits = context.ready_limits()
    model = context.resolve_model(fields.raw("model"))
    request = read_completion(
        fields,
        model=model,
        limits=limits,
        defaults=context.generation_defaults,
        seeds=context.seeds,
    )
    prompt = await completion_tokens(context, request)
    sampling = request.options.fit(
        len(prompt), limits.max_model_len, prompt_param=fields.param("prompt")
    )
    return PreparedRequest(
        TextSequence(context, prompt, sampling, request.options, arrived=arrived),
        _answer(CompletionAnswer, context, request.options, prompt, public_id),
        request.options,
    )


async def prepare_chat(
    context: GatewayContext, fields: Fields, *, public_id: str, arrived: float
) -> PreparedRequest:
    """Check and tokenize a chat request.

    Raises:
        ServingError: the server is not ready, or the request cannot be served.
    """
    limits = context.ready_limits()
    model = context.resolve_model(fields.raw("model"))
    request = read_chat(
        fields,
        model=model,
        limits=limits,
        defaults=context.generation_defaults,
        seeds=context.seeds,
    )
    prompt = await chat_tokens(context, request)
    sampling = request.options.fit(
        len(prompt), limits.max_model_len, prompt_param=fields.param("messages")
    )
    return PreparedRequest(
        TextSequence(context, prompt, sampling, request.options, arrived=arrived),
        _answer(ChatAnswer, context, request.options, prompt, public_id),
        request.options,
    )


def _answer(
    kind: type[Answer],
    context: GatewayContext,
    options: RequestOptions,
    prompt: list[int],
    public_id: str,
) -> Answer:
    return kind(
        context.tokenizer,
        public_id=public_id,
        model=options.model,
        prompt=prompt,
        logprobs=options.sampling.top_logprobs is not None,
        return_token_ids=options.return_token_ids,
        usage_in_chunks=options.include_usage,
    )
