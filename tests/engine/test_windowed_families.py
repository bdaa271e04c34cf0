"""Families with windows answer as transformers does while what no window shows is let go of.

Blocks that are free are filled with NaN after every step, so that none can be looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.blocks import BlockPool, BlockState
from engine.engine import Engine
from engine.events import (
    Add,
    BeginDecode,
    Event,
    KVRead,
    KVWritten,
    Prefilled,
    ReadKV,
    ReleaseExport,
    WriteKV,
)
from engine.jax_runner import JaxRunner
from engine.kernels.interface import KVPools
from engine.models.families import traits_of
from engine.placing import place_params
from engine.types import Failure, FailureCode, Role, SequenceRequest, TokenDelta
from tests.engine.helpers import make_engine, request, run
from tests.engine.test_families import GREEDY, golden, reader_of
from tests.engine.tiny import CHUNK_TOKENS, MAX_SEQS, make_runner, tiny_placement
from tests.golden.family_models import MAX_MODEL_LEN, VARIANTS, VOCAB

BLOCK_SIZE = 4
WHOLE, CHUNKED = MAX_MODEL_LEN + MAX_SEQS, 24
"""Tokens of one step."""


@functools.cache
def runner_of(variant: str, shards: int, windowed_blocks: int, end: str) -> JaxRunner:
    """`windowed_blocks`: of a pool of their own for the windowed layers. `end`: whose it is."""
    traits = traits_of(VARIANTS[variant])
    placement = tiny_placement(traits, "cpu", shards)
    params = place_params(placement, reader_of(variant, traits), np.float32, MAX_MODEL_LEN, "none")
    return make_runner(
        params,
        placement,
        Role.PREFILL,
        BLOCK_SIZE,
        prefill_len=152,
        max_model_len=MAX_MODEL_LEN,
        windowed_blocks=windowed_blocks or None,
    )


def engine_of(
    variant: str, shards: int, blocks: int, windowed: int, tokens: int, end: str = "prefill"
) -> Engine:
    """An engine with so many blocks, of steps of so many `tokens`. `windowed` are the blocks of
    windowed layers beside others; 0: all layers have one pool."""
    traits = traits_of(VARIANTS[variant])
    mixed = bool(traits.whole_layers)
    return make_engine(
        blocks,
        BLOCK_SIZE,
        runner_of(variant, shards, 64 if mixed and windowed else 0, end),
        reach=traits.reach if windowed else None,
        windowed_blocks=windowed if mixed and windowed else None,
        max_seqs=MAX_SEQS,
        max_batch_tokens=tokens,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB,
    )


def steps_of(engine: Engine) -> Iterator[Event]:
    """The events of all steps that there are to do; what is free is NaN after each."""
    while engine._scheduler.has_work or not engine._commands.empty():
        yield from engine.step().events
        engine.check_invariants()
        runner = engine._runner
        assert isinstance(runner, JaxRunner)
        pairs = zip(runner._pools, engine._scheduler._groups, strict=True)
        runner._pools = tuple(poisoned(pools, group.pool) for pools, group in pairs)


def poisoned(pools: KVPools, pool: BlockPool) -> KVPools:
    free = np.zeros(pools.k.shape[1], bool)
    free[[b for b in range(pool.num_blocks) if pool._state[b] is BlockState.FREE]] = True
    fill = filler(pools.k.sharding)
    return KVPools(*(fill(array, free[:, None, None, None]) for array in pools))


@functools.cache
def filler(sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    return jax.jit(lambda pool, free: jnp.where(free, jnp.nan, pool), out_shardings=sharding)


def serve(engine: Engine, requests: list[SequenceRequest]) -> tuple[dict[str, list[int]], int]:
    """What is answered to each request, tried again when it is preempted; and how often it was."""
    asked = {each.id.attempt.request_id: each for each in requests}
    outputs: dict[str, list[int]] = {name: [] for name in asked}
    preempted = 0
    for each in requests:
        engine.submit(Add(each))
    for event in steps_of(engine):
        if isinstance(event, TokenDelta):
            outputs[event.id.attempt.request_id] += event.tokens
        elif isinstance(event, Failure):
            assert event.code is FailureCode.PREEMPTED
            preempted += 1
            name = event.attempt.request_id
            prompt, output = asked[name].prompt, tuple(outputs[name])
            engine.submit(Add(request(name, prompt, output=output, **GREEDY)))
    return outputs, preempted


def check_colocated(variant: str, shards: int, tokens: int) -> None:
    """Blocks for three prompts, but not for their answers."""
    traits = traits_of(VARIANTS[variant])
    reach = traits.reach
    assert reach is not None
    windowed = 30 if tokens == CHUNKED else 45
    blocks = 64 if traits.whole_layers else windowed
    engine = engine_of(variant, shards, blocks, windowed, tokens)
    answers = golden(variant)[1]
    wanted = {f"{i}.{again}": each for i, each in enumerate(answers) for again in range(3)}
    outputs, preempted = serve(
        engine, [request(name, tuple(each["prompt"]), **GREEDY) for name, each in wanted.items()]
    )
    assert outputs == {name: each["output"] for name, each in wanted.items()}
    assert preempted or not traits.whole_layers
    for group in engine._scheduler._groups:
        assert group.pool.free == group.pool.num_blocks


@pytest.mark.parametrize("tokens", [WHOLE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "llama4", "mistral", "phi3"])
def test_answers_are_those_of_transformers(variant: str, tokens: int) -> None:
    check_colocated(variant, 1, tokens)


@pytest.mark.parametrize("variant", ["gemma3", "mistral"])
def test_shards_change_nothing(variant: str) -> None:
    check_colocated(variant, 2, CHUNKED)


def hand_over(prefill: Engine, decode: Engine, prompt: tuple[int, ...]) -> list[int]:
    """The answer where the KV that `decode` will see moves, and no more."""
    source = request("r", prompt, Role.PREFILL, b"t", **GREEDY)
    target = request("r", prompt, Role.DECODE, b"t", **GREEDY)
    group = decode._scheduler._groups[-1]
    seen = 0 if group.reach is None else max(0, len(prompt) - group.reach + 1)
    prefill.submit(Add(source))
    (first,) = [e.first for e in steps_of(prefill) if isinstance(e, Prefilled)]
    decode.submit(Add(target))
    list(steps_of(decode))
    at = 0 if group.index or group.reach is None else seen
    while at < len(prompt):
        windowed = at >= seen
        stop = min(at + CHUNK_TOKENS, len(prompt) if windowed else seen)
        prefill.submit(ReadKV(at, b"t", at, stop, windowed=windowed))
        (read,) = [e for e in steps_of(prefill) if isinstance(e, KVRead)]
        assert read.arrays is not None
        decode.submit(WriteKV(at, target.id, at, stop, read.arrays, windowed))
        assert KVWritten(at, ok=True) in list(steps_of(decode))
        at = stop
    prefill.submit(ReleaseExport(b"t"))
    list(steps_of(prefill))
    decode.submit(BeginDecode(target.id, first.tokens[0]))
    deltas = [first, *(e for e in steps_of(decode) if isinstance(e, TokenDelta))]
    return [token for delta in deltas for token in delta.tokens]


@pytest.mark.parametrize(
    ("variant", "shards", "windowed"),
    [("gemma3", 1, 12), ("llama4", 2, 12), ("mistral", 1, 12), ("gemma3", 2, 0)],
)
def test_a_decoder_gets_what_it_will_see(variant: str, shards: int, windowed: int) -> None:
    """From one that let go of the rest as well, or from one that has it all."""
    for each in golden(variant)[1]:
        prefill = engine_of(variant, shards, 64, windowed, CHUNKED)
        decode = engine_of(variant, 1, 64, 5, WHOLE, "decode")
        assert hand_over(prefill, decode, tuple(each["prompt"])) == each["output"]


def test_what_was_let_go_cannot_be_read() -> None:
    prompt = tuple(golden("gemma3")[1][1]["prompt"])
    engine = engine_of("gemma3", 1, 64, 12, CHUNKED)
    engine.submit(Add(request("r", prompt, Role.PREFILL, b"t", **GREEDY)))
    run(engine)
    engine.submit(ReadKV(1, b"t", 0, 4))
    assert KVRead(1, None) in run(engine)
