"""Packs the rows of a step plan into a program's padded arrays. NumPy only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from engine.kernels.batch import Batch
from engine.plan import BatchRow
from engine.programs import ProgramShape
from engine.sampling import RowParams


def pack_batch(rows: Sequence[BatchRow], shape: ProgramShape) -> Batch:
    """Rows (those of one token first) as a Batch of `shape`; see engine.kernels.batch.Batch."""
    flat = list(itertools.chain.from_iterable(row.tokens for row in rows))
    tokens = np.zeros(shape.tokens, np.int32)
    tokens[: len(flat)] = flat
    starts = np.full(shape.seqs + 1, len(flat), np.int32)
    starts[0] = 0
    tables = np.zeros((shape.seqs, shape.blocks), np.int32)
    kv_lens = np.zeros(shape.seqs, np.int32)
    end = 0
    for index, row in enumerate(rows):
        end += len(row.tokens)
        starts[index + 1] = end
        tables[index, : len(row.blocks)] = row.blocks
        kv_lens[index] = row.start + len(row.tokens)
    single = sum(1 for row in rows if len(row.tokens) == 1)
    return Batch(
        tokens, starts, tables, kv_lens, np.int32(len(rows)), np.int32(single), np.int32(len(flat))
    )


def pack_sampling(rows: Sequence[BatchRow], shape: ProgramShape) -> RowParams:
    """How each row samples, padded to `shape.seqs` rows."""
    n = shape.seqs
    params = RowParams(
        temperature=np.zeros(n, np.float32),
        top_k=np.zeros(n, np.int32),
        top_p=np.ones(n, np.float32),
        min_p=np.zeros(n, np.float32),
        presence=np.zeros(n, np.float32),
        frequency=np.zeros(n, np.float32),
        repetition=np.ones(n, np.float32),
        seed=np.zeros((n, 2), np.uint32),
        choice=np.zeros(n, np.int32),
        position=np.zeros(n, np.int32),
        slot=np.full(n, -1, np.int32),
        scored=np.zeros(n, bool),
    )
    for index, row in enumerate(rows):
        if row.sampling is None:
            continue
        own = row.sampling.params
        params.temperature[index] = own.temperature
        params.top_k[index] = own.top_k
        params.top_p[index] = own.top_p
        params.min_p[index] = own.min_p
        params.presence[index] = own.presence_penalty
        params.frequency[index] = own.frequency_penalty
        params.repetition[index] = own.repetition_penalty
        params.seed[index] = (own.seed >> 32, own.seed & 0xFFFFFFFF)
        params.choice[index] = row.sampling.choice
        params.position[index] = row.sampling.position
        params.slot[index] = row.slot if own.needs_token_counts else -1
        params.scored[index] = own.top_logprobs is not None
    return params
