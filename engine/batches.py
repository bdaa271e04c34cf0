"""The two arrays that a step's programs take, packed here and taken apart inside the programs.

One array costs a dispatch as much as twenty do, so a step has one for the forward pass, laid out
by the program's shape, and one for sampling, which depends on the number of rows alone. NumPy
only: `unpack_*` slice traced arrays as they slice NumPy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.kernels.batch import Batch
from engine.plan import BatchRow
from engine.programs import ProgramShape
from engine.sampling import RowParams


class PromptTargets(NamedTuple):
    """Prompt tokens whose log-probabilities are wanted; int32.

    Attributes:
        places: [N] the token before each, by its place in the batch.
        tokens: [N] their ids.
        count: how many are live.
    """

    places: Any
    tokens: Any
    count: Any


_ROW = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("repetition", "f4"),
        ("seed", "u4", (2,)),
        ("choice", "i4"),
        ("position", "i4"),
        ("slot", "i4"),
        ("biases", "i4"),
        ("bias_slot", "i4"),
        ("scored", "i4"),
        ("token_slot", "i4"),
    ]
)
"""How one row samples: RowParams, and the slot that keeps its token (-1: none is kept)."""
_WORD = 4
_IDLE = (0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, (0, 0), 0, 0, -1, 0, 0, 0, -1)


def pack_batch(rows: Sequence[BatchRow], shape: ProgramShape) -> np.ndarray:
    """Rows (those of one token first) as int32 words, for `unpack_batch`."""
    words = np.zeros(_batch_words(shape), np.int32)
    counts, tokens, starts, kv_lens, slots, places, targets, tables = _batch_parts(words, shape)
    lengths = [len(row.tokens) for row in rows]
    total, live = sum(lengths), len(rows)
    wanted = [target for row in rows for target in row.targets]
    counts[:] = live, lengths.count(1), total, len(wanted)
    tokens[:total] = list(itertools.chain.from_iterable(row.tokens for row in rows))
    starts[1 : live + 1] = list(itertools.accumulate(lengths))
    starts[live + 1 :] = total
    kv_lens[:live] = [row.stop for row in rows]
    slots[:live] = [row.slot for row in rows]
    if wanted:
        targets[: len(wanted)] = wanted
        places[: len(wanted)] = [
            begin + place
            for begin, row in zip(starts.tolist(), rows, strict=False)
            for place in range(len(row.targets))
        ]
    for each, row in zip(tables, rows, strict=False):
        for table, blocks in zip(each, row.tables, strict=True):
            table[: len(blocks)] = blocks
    return words


def unpack_batch(words: Any, shape: ProgramShape) -> tuple[tuple[Batch, ...], Any, PromptTargets]:
    """The Batch of each layer group, which differ in their tables alone; each row's slot [S]; and
    the targets. See engine.kernels.batch.Batch.

    A token below 0 is the one that was last sampled for the slot of its row.
    """
    counts, tokens, starts, kv_lens, slots, places, targets, tables = _batch_parts(words, shape)
    batches = tuple(
        Batch(tokens, starts, tables[:, group], kv_lens, counts[0], counts[1], counts[2])
        for group in range(shape.groups)
    )
    return batches, slots, PromptTargets(places, targets, counts[3])


def pack_sampling(rows: Sequence[BatchRow], seqs: int) -> np.ndarray:
    """How each row samples, padded to `seqs` rows, as int32 words, for `unpack_sampling`."""
    words = np.empty(1 + seqs * (_ROW.itemsize // _WORD), np.int32)
    words[0] = len(rows)
    records = words[1:].view(_ROW)
    records[:] = _IDLE
    for index, row in enumerate(rows):
        if row.sampling is None:
            continue
        own = row.sampling.params
        records[index] = (
            own.temperature,
            own.top_k,
            own.top_p,
            own.min_p,
            own.presence_penalty,
            own.frequency_penalty,
            own.repetition_penalty,
            (own.seed >> 32, own.seed & 0xFFFFFFFF),
            row.sampling.choice,
            row.sampling.position,
            row.slot if own.needs_token_counts else -1,
            row.sampling.biases,
            row.slot,
            own.top_logprobs is not None,
            row.slot,
        )
    return words


def unpack_sampling(words: Any, seqs: int) -> tuple[RowParams, Any, Any]:
    """Row parameters, the slots that keep the rows' tokens [S] (-1: none), and the live rows."""
    assert _ROW.fields is not None
    table = words[1:].reshape(seqs, _ROW.itemsize // _WORD)
    columns = {}
    for name, field in _ROW.fields.items():
        kind, first = field[0], field[1] // _WORD
        width = kind.itemsize // _WORD
        column = table[:, first : first + width] if kind.shape else table[:, first]
        columns[name] = column.view(kind.base)
    token_slots = columns.pop("token_slot")
    columns["scored"] = columns["scored"] != 0
    return RowParams(**columns), token_slots, words[0]


def _batch_words(shape: ProgramShape) -> int:
    rows = shape.seqs * (3 + shape.groups * shape.blocks)
    return 5 + shape.tokens + rows + 2 * shape.targets


def _batch_parts(words: Any, shape: ProgramShape) -> tuple[Any, ...]:
    """Counts of live rows, one-token rows, tokens and targets; then as in Batch, with the slots
    and the targets before the tables."""
    t, s, b, n = shape.tokens, shape.seqs, shape.blocks, shape.targets
    sizes = (4, t, s + 1, s, s, n, n)
    ends = list(itertools.accumulate(sizes))
    parts = [words[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return (*parts, words[ends[-1] :].reshape(s, shape.groups, b))
