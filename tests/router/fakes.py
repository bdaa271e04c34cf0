"""A generator that follows a script, and what is needed to serve it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.types import (
    AttemptId,
    FinishReason,
    ModelLimits,
    PromptLogprobs,
    SamplingParams,
    SequenceId,
    TokenDelta,
    TokenLogprobs,
)
from router.generation import NOT_URGENT, Tap
from router.siblings import Siblings
from router.urgency import Urgency

EOS = 256
VOCAB = 512
MAX_MODEL_LEN = 64

LIMITS = ModelLimits(
    fingerprint="fake",
    vocab_size=VOCAB,
    max_model_len=MAX_MODEL_LEN,
    block_size=16,
    num_blocks=100,
    max_seqs=8,
    eos_token_ids=frozenset({EOS}),
)


@dataclass
class Pause:
    """A step of a script: wait until the test sets it."""

    event: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Call:
    """One call of `generate`, as a test looks at it."""

    prompt: list[int]
    sampling: SamplingParams
    request_id: str
    choice: int = 0
    late: bool = False
    """Another output of the request had begun."""
    urgency: Urgency = NOT_URGENT
    siblings: Siblings | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False


Step = Sequence[int] | Pause | Exception


class ScriptedGenerator:
    """Plays a script of token batches, pauses and errors, obeying stop ids and max_tokens.

    The script is a list of steps, or a function from the prompt to one. When it runs out,
    `max_tokens` is taken to be reached.
    """

    def __init__(self, script: Iterable[Step] | Callable[[list[int]], Iterable[Step]] = ()):
        self.script = script
        self.limits: ModelLimits | None = LIMITS
        self.ready = True
        self.cached_tokens: Callable[[Call], int] = lambda _: 0
        """What the first delta of a call tells of its prompt."""
        self.prefill_s = 0.0
        self.calls: list[Call] = []
        self.tapped = 0
        """How many deltas were taken without being yielded."""

    @property
    def accepting(self) -> bool:
        return self.ready

    def health(self) -> dict[str, Any]:
        return {"ready": self.ready, "workers": []}

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        choice: int = 0,
        begun: Callable[[], bool] = lambda: False,
        urgency: Urgency = NOT_URGENT,
        siblings: Siblings | None = None,
        tap: Tap | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        call = Call(list(prompt), sampling, request_id, choice, begun(), urgency, siblings)
        self.calls.append(call)
        steps = self.script(call.prompt) if callable(self.script) else self.script
        sequence = SequenceId(AttemptId(request_id, 0), choice)
        index = 0
        try:
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, Pause):
                    await step.event.wait()
                    continue
                tokens, finish = _until_stop(step, sampling, index)
                delta = TokenDelta(
                    sequence,
                    index,
                    tokens,
                    _logprobs(tokens, sampling),
                    finish,
                    cached_tokens=0 if index else self.cached_tokens(call),
                    prefill_s=0.0 if index else self.prefill_s,
                )
                if index == 0:
                    scores = prompt_scores(sequence, call.prompt, sampling.prompt_logprobs)
                    delta = delta._replace(prompt_logprobs=scores)
                if index and tap is not None and tap.take(delta):
                    self.tapped += 1
                    tap.write()
                else:
                    yield delta
                index += len(tokens)
                if finish is not None:
                    call.finished = True
                    return
                await asyncio.sleep(0)
            call.finished = True
            yield TokenDelta(
                sequence, index, (), _logprobs((), sampling), finish=FinishReason.LENGTH
            )
        finally:
            call.closed.set()


def prompt_scores(
    sequence: SequenceId, prompt: Sequence[int], best: int | None
) -> PromptLogprobs | None:
    """The token at position p with -p; then the ids after the token before it with -1, -2, …"""
    if best is None:
        return None
    alternatives = [[(token + 1 + i) % VOCAB for i in range(best)] for token in prompt[:-1]]
    return PromptLogprobs(
        sequence,
        1,
        -np.arange(1, len(prompt), dtype=np.float32),
        np.array(alternatives, np.int32).reshape(len(prompt) - 1, best),
        np.tile(-np.arange(1, best + 1, dtype=np.float32), (len(prompt) - 1, 1)),
    )


def _until_stop(
    step: Sequence[int], sampling: SamplingParams, index: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    taken: list[int] = []
    for token in step:
        taken.append(token)
        if token in sampling.stop_token_ids:
            return tuple(taken), FinishReason.STOP
        if index + len(taken) == sampling.max_tokens:
            return tuple(taken), FinishReason.LENGTH
    return tuple(taken), None


def _logprobs(tokens: Sequence[int], sampling: SamplingParams) -> tuple[TokenLogprobs, ...] | None:
    """The chosen token with -0.5, then the next ids with -1, -2, …"""
    count = sampling.top_logprobs
    if count is None:
        return None
    return tuple(
        TokenLogprobs(
            logprob=-0.5,
            top_ids=tuple((token + i) % VOCAB for i in range(count)),
            top_logprobs=tuple(-0.5 - i for i in range(count)),
        )
        for token in tokens
    )


def batches(text: str, *sizes: int, end: Sequence[int] = (EOS,)) -> list[list[int]]:
    """The text's bytes as tokens, in batches of the given sizes, the last one repeated."""
    tokens = [*text.encode(), *end]
    result = []
    sizes = sizes or (1,)
    number = 0
    while tokens:
        size = sizes[min(number, len(sizes) - 1)]
        result.append(tokens[:size])
        tokens = tokens[size:]
        number += 1
    return result
