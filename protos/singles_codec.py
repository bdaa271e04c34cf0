"""Steps that bring one further token each to many sequences, packed.

Such tokens are nearly all there are. A sequence's first tokens tell its name and a number, unique
on the session for as long as the sequence is; the number alone tells whose the further ones are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from engine.types import AttemptId, SequenceId, TokenDelta
from protos import worker_pb2 as wire
from protos.errors import WireError

MOST_NUMBERS = 2**20
"""Far more sequences than one router has with one worker."""

Names = dict[int, SequenceId]
"""The router's end: whose a number is. Numbers are used again, so what is over needs no removal."""


class SequenceNumbers:
    """The worker's end: gives numbers, small ones, and takes them back."""

    def __init__(self) -> None:
        self._numbers: dict[SequenceId, int] = {}
        self._of: defaultdict[AttemptId, list[SequenceId]] = defaultdict(list)
        self._free: list[int] = []
        self._told: set[int] = set()

    def add(self, sequence: SequenceId) -> None:
        """Give the sequence a number, if it has none."""
        if sequence not in self._numbers:
            self._numbers[sequence] = self._free.pop() if self._free else len(self._numbers) + 1
            self._of[sequence.attempt].append(sequence)

    def forget(self, attempt: AttemptId) -> None:
        """Take back the numbers of an attempt's sequences; idempotent."""
        for sequence in self._of.pop(attempt, ()):
            number = self._numbers.pop(sequence)
            self._told.discard(number)
            self._free.append(number)

    def told(self, sequence: SequenceId) -> int:
        """The number by which the router knows the sequence; 0 where it knows of none."""
        number = self._numbers.get(sequence, 0)
        return number if number in self._told else 0

    def tell(self, sequence: SequenceId) -> int:
        """The number to be told now, with the sequence's name; 0 for one without."""
        number = self._numbers.get(sequence, 0)
        if number:
            self._told.add(number)
        return number


def is_single(delta: TokenDelta) -> bool:
    """Whether there is nothing to tell but where a token stands."""
    return (
        len(delta.tokens) == 1
        and delta.logprobs is None
        and delta.finish is None
        and not delta.cached_tokens
        and not delta.prefill_s
    )


def encode_singles(numbers: Sequence[int], deltas: Sequence[TokenDelta]) -> wire.Singles:
    """Of deltas that are single, each with its sequence's number."""
    return wire.Singles(
        numbers=numbers,
        indexes=[delta.index for delta in deltas],
        tokens=[delta.tokens[0] for delta in deltas],
    )


def note_name(names: Names, number: int, sequence: SequenceId) -> None:
    """Keep what a message tells of a number.

    Raises:
        WireError: the number is beyond all sense.
    """
    if number > MOST_NUMBERS:
        raise WireError(f"sequence number {number}")
    if number:
        names[number] = sequence


def decode_singles(message: wire.Singles, names: Names) -> tuple[TokenDelta, ...]:
    """The inverse of `encode_singles`.

    Raises:
        WireError: the arrays are of different lengths, or a number has not been told.
    """
    numbers, indexes, tokens = message.numbers, message.indexes, message.tokens
    if not len(numbers) == len(indexes) == len(tokens):
        raise WireError(f"{len(numbers)} numbers, {len(indexes)} indexes, {len(tokens)} tokens")
    make = TokenDelta._make  # twice as fast as the call, and every token passes here
    try:
        return tuple(
            [
                make((names[number], index, (token,), None, None, 0, None, 0.0))
                for number, index, token in zip(numbers, indexes, tokens, strict=True)
            ]
        )
    except KeyError as error:
        raise WireError(f"tokens of sequence number {error}, which was not told") from None
