"""The real engine on a tiny model: the same tokens however it is cut, placed and batched."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from engine.events import Add, BeginDecode, KVRead, ReadKV, ReleaseExport, WriteKV
from engine.jax_runner import JaxRunner
from engine.pace import Pace
from engine.placing import Placement
from engine.types import (
    COLOCATED,
    AttemptId,
    FinishReason,
    Role,
    SequenceId,
    SequenceRequest,
    TokenDelta,
    TokenLogprobs,
)
from tests.engine.helpers import Ahead, OneByOne, deltas_of, hand_over, request, run
from tests.engine.tiny import (
    CHUNK_TOKENS,
    CONFIG,
    make_runner,
    tiny_engine,
    tiny_params,
    tiny_placement,
    tiny_traits,
)

VOCAB = CONFIG["vocab_size"]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "seed": 2**40 + 3},
    "penalized": {
        "temperature": 0.8,
        "seed": 5,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
    },
    "greedy_penalized": {"temperature": 0.0, "repetition_penalty": 1.8},
    "biased": {
        "temperature": 0.7,
        "seed": 11,
        "logit_bias": ((3, 2.5), (50, -100.0), (96, 3.5)),
        "frequency_penalty": 0.3,
        "prompt_logprobs": 2,
    },
}
COMPILES: list[str] = []


def _on_event(name: str, _: float, **__: object) -> None:
    if name == "/jax/core/compile/backend_compile_duration":
        COMPILES.append(name)


jax.monitoring.register_event_duration_secs_listener(_on_event)


@functools.cache
def shared_placement() -> Placement:
    return tiny_placement(tiny_traits(), "auto")


@functools.cache
def shared_params(dtype: Any = np.float32) -> Any:
    return tiny_params(shared_placement(), dtype)


@functools.cache
def shared_runner(
    roles: Role = COLOCATED, block_size: int = 16, dtype: Any = np.float32
) -> JaxRunner:
    return make_runner(shared_params(dtype), shared_placement(), roles, block_size, dtype)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((17 * i * i + 3 * i + length) % VOCAB for i in range(length))


def asked(length: int, kind: str, roles: Role = COLOCATED, **more: object) -> SequenceRequest:
    name = f"{kind}{length}"
    settings = {"max_tokens": 10, "top_logprobs": 3} | KINDS[kind] | more
    return request(name, prompt_of(length), roles, name.encode(), **settings)


def named(request: SequenceRequest) -> SequenceRequest:
    """`request` under a name of its role, so that one engine can serve both ends."""
    name = f"{request.id.attempt.request_id} {request.roles}"
    return dataclasses.replace(request, id=SequenceId(AttemptId(name, 0), 0))


def tokens_of(deltas: list[TokenDelta]) -> tuple[int, ...]:
    assert [d.index for d in deltas] == list(range(deltas[0].index, deltas[0].index + len(deltas)))
    return tuple(token for d in deltas for token in d.tokens)


def logprobs_of(deltas: list[TokenDelta]) -> list[TokenLogprobs]:
    return [each for d in deltas for each in d.logprobs or ()]


def alone(length: int, kind: str, runner: JaxRunner | None = None) -> list[TokenDelta]:
    engine = tiny_engine(runner or shared_runner())
    wanted = asked(length, kind)
    engine.submit(Add(wanted))
    return deltas_of(run(engine), wanted.id.attempt.request_id)


def assert_alike(some: list[TokenDelta], others: list[TokenDelta]) -> None:
    assert tokens_of(some) == tokens_of(others)
    for one, other in zip(logprobs_of(some), logprobs_of(others), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
        assert len(one.top_ids) == len(other.top_ids) == 3
        assert one.top_ids == other.top_ids


def test_the_tiny_model_gives_varied_answers() -> None:
    """Or the comparisons below would compare nothing."""
    answers = {(n, kind): tokens_of(alone(n, kind)) for n in (1, 5, 30) for kind in KINDS}
    assert len(set(answers.values())) == len(answers)
    for (_, kind), tokens in answers.items():
        assert len(tokens) == 10
        if "penalized" in kind:
            assert len(set(tokens)) > 5


def test_greedy_logprobs_are_those_of_the_best_token() -> None:
    deltas = alone(7, "greedy")
    for token, scores in zip(tokens_of(deltas), logprobs_of(deltas), strict=True):
        assert scores.top_ids[0] == token
        assert scores.logprob == scores.top_logprobs[0] < 0
        assert sorted(scores.top_logprobs, reverse=True) == list(scores.top_logprobs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "piece"), [(1, 12), (13, 5), (24, 12), (53, 12)])
def test_a_handoff_changes_nothing(length: int, piece: int, kind: str) -> None:
    """Blocks of 8 for prefill, 32 for decode, 16 for both; pieces do not divide the prompt."""
    prefill = tiny_engine(shared_runner(Role.PREFILL, 8))
    decode = tiny_engine(shared_runner(Role.DECODE, 32))
    deltas = hand_over(prefill, decode, lambda roles: asked(length, kind, roles), piece)
    assert_alike(deltas, alone(length, kind))


def test_together_is_as_alone() -> None:
    engine = tiny_engine(shared_runner())
    cases = [(n, kind) for n in (1, 3, 8, 9, 31) for kind in KINDS]
    for length, kind in cases:
        engine.submit(Add(asked(length, kind)))
    events = run(engine)
    for length, kind in cases:
        assert_alike(deltas_of(events, f"{kind}{length}"), alone(length, kind))


@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_that_take_turns_in_chunks_change_nothing(rows: int) -> None:
    chunk = {"max_batch_tokens": 4 + 9, "max_prefill_seqs": rows, "interleave_prefills": True}
    engine = tiny_engine(shared_runner(), **chunk)
    cases = [(n, kind) for n in (53, 31, 9, 2) for kind in KINDS]
    for length, kind in cases:
        engine.submit(Add(asked(length, kind)))
    events = run(engine)
    for length, kind in cases:
        assert_alike(deltas_of(events, f"{kind}{length}"), alone(length, kind))


def test_looking_ahead_changes_nothing() -> None:
    """Penalties, noise and log-probabilities, in slots that others leave in mid-flight."""
    cases = [(n, kind, stop) for stop, n in enumerate((2, 7, 9, 30)) for kind in KINDS]
    answers: dict[type[Pace], list[list[TokenDelta]]] = {}
    for pace in (Ahead, OneByOne):
        engine = tiny_engine(shared_runner(), pace=pace())
        for length, kind, stop in cases:
            stops = frozenset({tokens_of(alone(length, kind))[2 + stop]})
            engine.submit(Add(asked(length, kind, stop_token_ids=stops)))
        events = run(engine)
        answers[pace] = [deltas_of(events, f"{kind}{length}") for length, kind, _ in cases]
    lengths = {len(tokens_of(deltas)) for deltas in answers[Ahead]}
    assert len(lengths) > 3
    for ahead, one_by_one in zip(*answers.values(), strict=True):
        assert_alike(ahead, one_by_one)
        assert ahead[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_sequence_goes_on_as_it_would_have(kind: str) -> None:
    whole = tokens_of(alone(9, kind))
    engine = tiny_engine(shared_runner())
    resumed = request("again", prompt_of(9), output=whole[:4], **KINDS[kind], max_tokens=10)
    engine.submit(Add(resumed))
    deltas = deltas_of(run(engine), "again")
    assert deltas[0].index == 4
    assert tokens_of(deltas) == whole[4:]


def test_choices_of_one_request_differ_and_a_prompt_may_fill_the_context() -> None:
    engine = tiny_engine(shared_runner())
    for choice in (0, 1):
        engine.submit(Add(request("r", prompt_of(4), choice=choice, seed=1, max_tokens=9)))
    full = request("full", prompt_of(79), temperature=0.0, max_tokens=9)
    engine.submit(Add(full))
    events = run(engine)
    assert tokens_of(deltas_of(events, "r", 0)) != tokens_of(deltas_of(events, "r", 1))
    assert len(tokens_of(deltas_of(events, "full"))) == 1


def test_nothing_is_compiled_after_warm_up() -> None:
    """Every size of batch, copies, penalties and log-probabilities."""
    runner = make_runner(shared_params(), shared_placement(), prefill_len=44)
    COMPILES.clear()
    runner.warm_up()
    assert COMPILES
    COMPILES.clear()
    engine = tiny_engine(runner)
    for length in (1, 2, 16, 31, 33, 79):
        for kind in KINDS:
            engine.submit(Add(asked(length, kind)))
    run(engine)
    hand_over(engine, engine, lambda roles: named(asked(30, "penalized", roles)), 7)
    assert COMPILES == []


def test_pools_and_counts_are_updated_in_place() -> None:
    runner = shared_runner()

    def pointers() -> list[int]:
        return [a.unsafe_buffer_pointer() for a in (*runner._pools[0], runner._counts)]

    before = pointers()
    alone(20, "penalized", runner)
    assert pointers() == before
    engine = tiny_engine(runner)
    wanted = asked(20, "greedy", Role.PREFILL)
    engine.submit(Add(wanted))
    run(engine)
    engine.submit(ReadKV(1, wanted.transfer_id, 0, CHUNK_TOKENS))
    (read,) = [e for e in run(engine) if isinstance(e, KVRead)]
    assert read.arrays is not None
    kept = [array.copy() for array in read.arrays]
    engine.submit(ReleaseExport(wanted.transfer_id))
    target = asked(20, "sampled", Role.DECODE)
    engine.submit(Add(target))
    run(engine)
    engine.submit(WriteKV(2, target.id, 0, CHUNK_TOKENS, read.arrays))
    run(engine)
    alone(50, "greedy", runner)
    assert pointers() == before
    # What was exported stays as it was, whatever the pool holds by now.
    assert all(np.array_equal(a, b) for a, b in zip(read.arrays, kept, strict=True))


def test_imported_arrays_may_be_overwritten_after_the_step() -> None:
    """They are memory that the transport uses again: whole chunks are not copied before."""
    runner = shared_runner()
    engine = tiny_engine(runner)
    source = asked(CHUNK_TOKENS, "greedy", Role.PREFILL)
    engine.submit(Add(source))
    (first,) = deltas_of(run(engine), source.id.attempt.request_id)
    engine.submit(ReadKV(1, source.transfer_id, 0, CHUNK_TOKENS))
    (read,) = [e for e in run(engine) if isinstance(e, KVRead)]
    assert read.arrays is not None
    engine.submit(ReleaseExport(source.transfer_id))
    run(engine)
    target = asked(CHUNK_TOKENS, "greedy", Role.DECODE)
    engine.submit(Add(target))
    run(engine)
    arrays = tuple(_aligned(array) for array in read.arrays)
    engine.submit(WriteKV(2, target.id, 0, CHUNK_TOKENS, arrays))
    engine.step()
    for array in arrays:
        array[:] = 99
    engine.submit(BeginDecode(target.id, first.tokens[0]))
    deltas = deltas_of(run(engine), target.id.attempt.request_id)
    assert tokens_of(deltas) == tokens_of(alone(CHUNK_TOKENS, "greedy"))[1:]


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 64 bytes, which jax may use without copying."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    copy = raw[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


@pytest.mark.parametrize("kind", ["greedy", "penalized"])
def test_bfloat16(kind: str) -> None:
    """The same tokens with and without a handoff, and KV that travels as bfloat16."""
    dtype = ml_dtypes.bfloat16
    runner = shared_runner(COLOCATED, 16, dtype)
    assert runner._pools[0].k.dtype.itemsize == 2
    whole = alone(21, kind, runner)
    engine = tiny_engine(runner)
    deltas = hand_over(engine, engine, lambda roles: named(asked(21, kind, roles)), 10)
    assert tokens_of(deltas) == tokens_of(whole)

    # It is the same model: close to float32, and not equal.
    exact = alone(21, kind)
    assert tokens_of(whole)[0] == tokens_of(exact)[0]
    assert logprobs_of(whole)[0].logprob == pytest.approx(logprobs_of(exact)[0].logprob, abs=0.2)
    assert logprobs_of(whole)[0].logprob != logprobs_of(exact)[0].logprob


def test_exports_are_of_the_pools_dtype() -> None:
    engine = tiny_engine(shared_runner(COLOCATED, 16, ml_dtypes.bfloat16))
    wanted = asked(5, "greedy", Role.PREFILL)
    engine.submit(Add(wanted))
    run(engine)
    engine.submit(ReadKV(1, wanted.transfer_id, 1, 4))
    (read,) = [e for e in run(engine) if isinstance(e, KVRead)]
    assert read.arrays is not None
    for array in read.arrays:
        assert array.shape == (2, 3, 2, tiny_traits().head_dim)
        assert array.dtype == ml_dtypes.bfloat16
        assert np.isfinite(array.astype(np.float32)).all()
        assert array.astype(np.float32).any()
