"""The bounded list of program shapes that an engine compiles. Plain Python, no jax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.types import Role

MAX_PROGRAMS = 32
TOKEN_GROWTH = 2
SEQ_GROWTH = 2
SCORED_TOKENS = 64
"""Tokens whose logits are computed at once where a prompt's log-probabilities are wanted."""
BLOCK_GROWTH = 32  # kernels skip the padding of a block table, so coarse steps cost little


class TooManyPrograms(ValueError):
    """The paddings would make more programs than MAX_PROGRAMS; the message has the sums."""


@dataclass(frozen=True, order=True, slots=True)
class ProgramShape:
    """One compiled program: `tokens` flat tokens of `seqs` rows with `blocks` table entries.

    Each row has a block table for each of so many layer `groups`.
    """

    tokens: int
    seqs: int
    blocks: int
    groups: int = 1

    @property
    def targets(self) -> int:
        """How many tokens' log-probabilities it computes: none without prompts."""
        return round_up(self.tokens, SCORED_TOKENS) if self.tokens > self.seqs else 0


@dataclass(frozen=True, slots=True)
class Paddings:
    """Smallest size and granularity of each dimension (the `--*_padding` flags)."""

    prefill_len: int
    prefill_seqs: int
    decode_seqs: int
    decode_blocks: int


@dataclass(frozen=True, slots=True)
class Extent:
    """The largest batch that the programs must hold.

    Attributes:
        max_prefill_tokens: tokens of one step when it holds a prompt.
        max_prefill_seqs: prompts in one step.
        max_decode_seqs: decoding sequences in one step.
        max_blocks: blocks of the longest sequence.
    """

    max_prefill_tokens: int
    max_prefill_seqs: int
    max_decode_seqs: int
    max_blocks: int


def round_up(value: int, granularity: int) -> int:
    return -(-value // granularity) * granularity


def sizes(padding: int, largest: int, growth: int) -> list[int]:
    """Geometric sizes, multiples of `padding`, from `padding` to at least `largest`.

    A last size within a quarter of the one before the largest is merged into the largest.
    """
    top = round_up(largest, padding)
    result = []
    size = padding
    while size * 5 < top * 4:
        result.append(size)
        size *= growth
    return [*result, top]


def program_shapes(roles: Role, extent: Extent, paddings: Paddings) -> tuple[ProgramShape, ...]:
    """Every shape an engine with `roles` may run, smallest first.

    A step of one-token rows alone takes a (S, S, B) program; a step that holds a prompt
    takes a (T, most rows, most blocks) one.

    Raises:
        TooManyPrograms: there would be more than MAX_PROGRAMS.
    """
    shapes: list[ProgramShape] = []
    rows = 0
    arithmetic = []
    if Role.DECODE in roles:
        seqs = sizes(paddings.decode_seqs, extent.max_decode_seqs, SEQ_GROWTH)
        blocks = sizes(paddings.decode_blocks, extent.max_blocks, BLOCK_GROWTH)
        shapes += [ProgramShape(s, s, b) for s in seqs for b in blocks]
        rows = seqs[-1]
        arithmetic.append(
            f"{len(seqs)} batch sizes (--decode_seqs_padding={paddings.decode_seqs} up to "
            f"{seqs[-1]}) x {len(blocks)} table sizes (--decode_blocks_padding="
            f"{paddings.decode_blocks} up to {blocks[-1]})"
        )
    if Role.PREFILL in roles:
        padding, prompts = paddings.prefill_seqs, extent.max_prefill_seqs
        # A colocated engine has one slot per sequence, whether it prefills or decodes.
        rows = rows or (round_up(prompts, padding) if prompts > padding else prompts)
        # More tokens than rows tells these programs from those of one-token rows.
        largest = max(extent.max_prefill_tokens, rows + 1)
        tokens = [t for t in sizes(paddings.prefill_len, largest, TOKEN_GROWTH) if t > rows]
        shapes += [ProgramShape(t, rows, extent.max_blocks) for t in tokens]
        arithmetic.append(
            f"{len(tokens)} prompt sizes (--prefill_len_padding={paddings.prefill_len} up to "
            f"{tokens[-1]})"
        )
    if len(shapes) > MAX_PROGRAMS:
        raise TooManyPrograms(
            f"{' + '.join(arithmetic)} = {len(shapes)} programs, more than {MAX_PROGRAMS}: "
            "raise a padding"
        )
    return tuple(sorted(shapes))


def smallest(shapes: Iterable[ProgramShape], tokens: int, seqs: int, blocks: int) -> ProgramShape:
    """The cheapest of `shapes` that holds a batch; `tokens == seqs` when all rows have one.

    Raises:
        LookupError: none does; the scheduler's limits and the shapes disagree.
    """
    decode = tokens == seqs
    fits = [
        shape
        for shape in shapes
        if shape.tokens >= tokens
        and shape.seqs >= seqs
        and shape.blocks >= blocks
        and (decode or shape.tokens > shape.seqs)
    ]
    if not fits:
        raise LookupError(f"no program holds {tokens} tokens in {seqs} rows of {blocks} blocks")
    return min(fits, key=lambda s: (s.tokens, s.blocks, s.seqs))
