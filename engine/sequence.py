"""A sequence in the engine and its lifecycle. Plain Python, no jax."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from engine.prefix_cache import Prefix
from engine.types import FinishReason, Role, SamplingParams, SequenceId, SequenceRequest


class SequenceState(enum.Enum):
    """Where a sequence is. The names are also those of metrics and fault points."""

    WAITING = "waiting"  # in the queue, owns nothing
    PREFILLING = "prefilling"  # blocks reserved, known tokens being computed
    IMPORTING = "importing"  # blocks reserved, KV arriving from a prefill worker
    DECODING = "decoding"  # one new token per step
    EXPORTED = "exported"  # computed; its blocks wait to be fetched
    ENDED = "ended"  # owns nothing, is nowhere


TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset(
        {SequenceState.PREFILLING, SequenceState.IMPORTING, SequenceState.ENDED}
    ),
    SequenceState.PREFILLING: frozenset(
        {SequenceState.DECODING, SequenceState.EXPORTED, SequenceState.ENDED}
    ),
    SequenceState.IMPORTING: frozenset({SequenceState.DECODING, SequenceState.ENDED}),
    SequenceState.DECODING: frozenset({SequenceState.ENDED}),
    SequenceState.EXPORTED: frozenset({SequenceState.ENDED}),
    SequenceState.ENDED: frozenset(),
}


def no_tables() -> list[np.ndarray]:
    """As many as there can be layer groups."""
    return [np.empty(0, np.int32)] * 2


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence being served.

    Attributes:
        tokens: prompt and output token ids so far.
        computed: KV of `tokens[0:computed]` is in the blocks.
        scheduled: it is, or will be when the dispatched steps have run; counts unread tokens.
        unread: tokens that dispatched steps sample, and that are not in `tokens` yet.
        last_step: number of the last dispatched step that names its blocks.
        tables: the block table of each layer group, int32, in token order; empty unless it owns
            blocks. Steps that are under way hold views of them: they are replaced, never changed.
        given_back: so many leading entries of a windowed table are its own no more; see
            engine.layer_groups.
        slot: row of the per-sequence state on the devices, -1 without one.
        admitted: time.monotonic() when it left the queue.
        reused: tokens whose KV it found here when it was admitted.
        prefix: its full blocks, as the prefix cache knows them.
        awaits: name of a block that another one computes and that it waits for in the queue.
    """

    request: SequenceRequest
    tokens: list[int]
    state: SequenceState = SequenceState.WAITING
    computed: int = 0
    scheduled: int = 0
    unread: int = 0
    last_step: int = 0
    tables: list[np.ndarray] = field(default_factory=no_tables)
    given_back: int = 0
    slot: int = -1
    admitted: float = 0.0
    reused: int = 0
    prefix: Prefix = field(default_factory=Prefix)
    awaits: int | None = None

    @classmethod
    def of(cls, request: SequenceRequest) -> Sequence:
        return cls(request, list(request.known_tokens))

    @property
    def blocks(self) -> np.ndarray:
        """The block table of the first layer group, which is the only one in most models."""
        return self.tables[0]

    @blocks.setter
    def blocks(self, table: np.ndarray) -> None:
        self.tables[0] = table

    @property
    def id(self) -> SequenceId:
        return self.request.id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def decodes_here(self) -> bool:
        return Role.DECODE in self.request.roles

    @property
    def length(self) -> int:
        """Tokens, those that dispatched steps sample among them."""
        return len(self.tokens) + self.unread

    def enter(self, state: SequenceState) -> None:
        """Change state.

        Raises:
            ValueError: the lifecycle has no such transition.
        """
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"{self.id}: {self.state.value} → {state.value} is not a transition")
        self.state = state

    def most_tokens(self, max_model_len: int) -> int:
        """Tokens that prompt and output may reach; KV is needed for one fewer."""
        return min(len(self.request.prompt) + self.sampling.max_tokens, max_model_len)

    def finish_after(self, token: int, max_model_len: int) -> FinishReason | None:
        """Whether `token`, just appended to `tokens`, is the last one."""
        own = self.sampling
        if token in own.stop_token_ids and self.output_count > own.min_tokens:
            return FinishReason.STOP
        if len(self.tokens) >= self.most_tokens(max_model_len):
            return FinishReason.LENGTH
        return None
