"""The border between the HTTP gateway and the dispatch to workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from engine.types import ModelLimits, SamplingParams, TokenDelta
from router.siblings import Siblings
from router.urgency import Urgency

NOT_URGENT = Urgency()


class Tap(Protocol):
    """Takes deltas as soon as they come, without a task that has to be woken for them.

    Called on the loop, and only while its owner waits for the next delta: all before have been
    dealt with.
    """

    def take(self, delta: TokenDelta) -> bool:
        """Deal with a delta, or return False: then it comes out of `generate` as others do."""

    def write(self) -> None:
        """Send what has been made of those taken; after the other sequences' of the same step."""


class Generator(Protocol):
    """Turns token ids into token ids by way of the workers."""

    @property
    def limits(self) -> ModelLimits | None:
        """The served model's limits, those last known when no worker is left; None at first."""

    @property
    def ready(self) -> bool:
        """True while requests can be served; False while loading or draining."""

    @property
    def accepting(self) -> bool:
        """True while requests are taken: when `ready`, or a lost worker is waited for."""

    def health(self) -> dict[str, Any]:
        """A JSON-able account of the workers for `/health`."""

    def generate(
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
        """Yield the deltas of one sequence, in order and without gaps.

        The first has the prompt's log-probabilities, where `sampling` asks for them; the last has
        `finish` set. Closing the generator early (`aclose`) aborts the
        request on every worker that knows of it. `request_id` is internal and unique; `choice`
        counts the outputs of one prompt and seed, and keys their noise. `begun()` tells whether
        another output has begun of the same client's request, which then waits for room instead
        of being refused. `urgency` orders those that wait, and may end this by DeadlinePassed.
        `siblings` is the same for all choices of one prompt, which is then computed once.
        `tap` is offered deltas first, though not all; what it takes is not yielded.

        Raises:
            ServingError: see router.errors; before the first delta or between two.
        """
