"""The CPU kernels give a sequence the same bits whatever it is computed with.

Alone or among others, whole or in chunks, recomputed, with one thread or two: logits and KV
are compared bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import ml_dtypes
import numpy as np
import pytest

from engine.batches import pack_batch
from engine.jax_runner import JaxRunner, PoolSpec
from engine.kernels.cpu import native
from engine.plan import BatchRow
from engine.programs import ProgramShape, smallest
from engine.types import AttemptId, SequenceId
from tests.engine.tiny import tiny_params, tiny_placement, tiny_traits

VOCAB, BLOCK_SIZE, MAX_LEN, NEIGHBOURS = 97, 8, 600, 15
TABLE = MAX_LEN // BLOCK_SIZE
SHAPES = tuple(
    ProgramShape(*shape, TABLE) for shape in ((1, 1), (16, 16), (96, 17), (560, 17), (1200, 17))
)
PROMPT, OUTPUT = 530, 6
TOKENS = tuple((17 * i * i + 3 * i + 5) % VOCAB for i in range(PROMPT + OUTPUT))
Bits = dict[int, np.ndarray]
"""Position of a row's last token → its logits as integers."""


@functools.cache
def runner_of(dtype: str, quantization: str) -> JaxRunner:
    traits = tiny_traits(
        hidden_size=64, intermediate_size=112, num_attention_heads=6, num_key_value_heads=2,
        head_dim=24, attention_bias=True, mlp_bias=True, max_position_embeddings=MAX_LEN,
    )  # fmt: skip
    placement = tiny_placement(traits, "cpu")
    return JaxRunner(
        tiny_params(placement, dtype, MAX_LEN, quantization),
        placement,
        PoolSpec((NEIGHBOURS + 1) * TABLE, BLOCK_SIZE, dtype),
        SHAPES,
        max_seqs=16,
        max_model_len=MAX_LEN,
        chunk_tokens=MAX_LEN,
    )


@pytest.fixture(params=["float32 none", "bfloat16 none", "float32 int8", "bfloat16 int8"])
def runner(request: pytest.FixtureRequest) -> Iterator[JaxRunner]:
    yield runner_of(*request.param.split())
    native.load().limit_threads(0)


def row_of(place: int, tokens: Sequence[int], start: int, stop: int) -> BatchRow:
    """Tokens [start, stop) of a sequence whose blocks are those of `place`."""
    blocks = np.arange(place * TABLE, (place + 1) * TABLE, dtype=np.int32)
    name = SequenceId(AttemptId(str(place), 0), 0)
    return BatchRow(name, tuple(tokens[start:stop]), start, blocks, 0, None)


def logits_of(runner: JaxRunner, rows: Sequence[BatchRow]) -> np.ndarray:
    """uint32 [rows, vocab]: the bits of each row's logits; one-token rows must come first."""
    shape = smallest(SHAPES, sum(len(row.tokens) for row in rows), len(rows), TABLE)
    last = runner._last_tokens
    forward = runner._programs.forward(shape, runner._params, runner._pools, last)
    logits, runner._pools, _ = forward(runner._params, runner._pools, pack_batch(rows, shape), last)
    return np.asarray(logits)[: len(rows)].view(np.uint32)


def computed(
    runner: JaxRunner, ends: Sequence[int], neighbours: int = 0
) -> tuple[Bits, list[np.ndarray]]:
    """TOKENS in steps that end at `ends`, beside `neighbours` other rows of one token."""
    bits: Bits = {}
    for start, stop in zip((0, *ends), ends, strict=False):
        row = row_of(0, TOKENS, start, stop)
        others = [
            row_of(1 + n, TOKENS[n:] + TOKENS[:n], start % 40 + n, start % 40 + n + 1)
            for n in range(neighbours)
        ]
        rows = [row, *others] if stop - start == 1 else [*others, row]
        bits[stop - 1] = logits_of(runner, rows)[rows.index(row)]
    slots = np.zeros(MAX_LEN, np.int32)
    slots[: len(TOKENS)] = np.arange(len(TOKENS))
    exported = runner._programs.export_kv(runner._pools, (slots,), np.int32(len(TOKENS)))
    width = np.uint16 if exported[0].dtype == ml_dtypes.bfloat16 else np.uint32
    return bits, [np.asarray(array)[:, : len(TOKENS)].view(width).copy() for array in exported]


def wiped(runner: JaxRunner) -> None:
    """Pools of NaN: what is not written anew must not pass for right."""
    runner._pools = jax.tree.map(lambda pool: jax.numpy.full_like(pool, np.nan), runner._pools)


def ends_of(prompt_chunk: int) -> list[int]:
    """The prompt in chunks, then the output token by token."""
    chunks = list(range(prompt_chunk, PROMPT, prompt_chunk))
    return [*chunks, *range(PROMPT, PROMPT + OUTPUT + 1)]


WAYS = {
    "one by one": (ends_of(1), 0),
    "chunks of 64": (ends_of(64), 0),
    "chunks of 512": (ends_of(512), 0),
    "in a batch of 16": (ends_of(PROMPT), NEIGHBOURS),
    "chunks of 64 in a batch of 16": (ends_of(64), NEIGHBOURS),
    "recomputed from prompt and output": ([PROMPT + OUTPUT - 2, *ends_of(PROMPT)[-2:]], 0),
}


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_are_the_same_on_every_way(runner: JaxRunner, threads: int) -> None:
    native.load().limit_threads(0)
    wiped(runner)
    wanted_bits, wanted_kv = computed(runner, ends_of(PROMPT))
    assert len({array.tobytes() for array in wanted_bits.values()}) > OUTPUT - 1
    native.load().limit_threads(threads)
    for way, (ends, neighbours) in WAYS.items():
        wiped(runner)
        bits, kv = computed(runner, ends, neighbours)
        common = wanted_bits.keys() & bits.keys()
        assert len(common) >= 2
        for position in common:
            assert np.array_equal(bits[position], wanted_bits[position]), (way, position)
        for name, found, wanted in zip("kv", kv, wanted_kv, strict=True):
            differ = np.argwhere((found != wanted).any(axis=(0, 2, 3))).ravel()
            assert not differ.size, f"{way}: {name} differs at positions {differ[:5]}"
