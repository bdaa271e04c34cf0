"""A prompt's log-probabilities: the model's own, however the prompt is cut, placed and batched."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from engine.batches import pack_batch
from engine.events import Add, Event
from engine.jax_runner import JaxRunner
from engine.plan import BatchRow, RunBatch, StepPlan
from engine.types import (
    COLOCATED,
    AttemptId,
    PromptLogprobs,
    Role,
    SequenceId,
    SequenceRequest,
    TokenDelta,
)
from tests.engine.helpers import expected, make_engine, request, run
from tests.engine.tiny import (
    CONFIG,
    make_runner,
    tiny_engine,
    tiny_params,
    tiny_placement,
    tiny_traits,
)

VOCAB = CONFIG["vocab_size"]
LONG = 79
KERNELS = ["auto", "reference"]


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((17 * i * i + 3 * i + length) % VOCAB for i in range(length))


@functools.cache
def runner_of(kernels: str, roles: Role = COLOCATED, shards: int = 1) -> JaxRunner:
    placement = tiny_placement(tiny_traits(), kernels, shards)
    return make_runner(tiny_params(placement), placement, roles)


def asked(length: int, roles: Role = COLOCATED, best: int = 3) -> SequenceRequest:
    name = f"{length}"
    settings = {"temperature": 0.0, "max_tokens": 3, "prompt_logprobs": best}
    return request(name, prompt_of(length), roles, name.encode(), **settings)


def scores_in(events: list[Event], name: str) -> PromptLogprobs:
    """All of them, which must come in order, without gaps, and before the first token."""
    wanted = SequenceId(AttemptId(name, 0), 0)
    own = [e for e in events if isinstance(e, PromptLogprobs | TokenDelta) and e.id == wanted]
    pieces = [e for e in own if isinstance(e, PromptLogprobs)]
    assert own[: len(pieces)] == pieces
    assert [p.start for p in pieces] == [1, *(p.stop for p in pieces)][:-1]
    return PromptLogprobs(
        wanted,
        1,
        np.concatenate([p.logprobs for p in pieces]),
        np.concatenate([p.top_ids for p in pieces]),
        np.concatenate([p.top_logprobs for p in pieces]),
    )


def scored(
    runner: JaxRunner, length: int, roles: Role = COLOCATED, **limits: int
) -> PromptLogprobs:
    engine = tiny_engine(runner, **limits)
    engine.submit(Add(asked(length, roles)))
    return scores_in(run(engine), f"{length}")


@functools.cache
def oracle(kernels: str, length: int) -> np.ndarray:
    """float64 [length - 1, vocab]: log-softmax of the logits after each part of the prompt."""
    runner, tokens = runner_of(kernels), prompt_of(length)
    shape, last = runner._shapes[-1], runner._last_tokens
    forward = runner._programs.forward(shape, runner._params, runner._pools, last)
    blocks = np.arange(-(-length // runner._block_size), dtype=np.int32)
    rows = []
    for stop in range(1, length):
        row = BatchRow(SequenceId(AttemptId("r", 0), 0), tokens[:stop], 0, blocks, 0, None)
        words = pack_batch((row,), shape)
        logits, runner._pools, _ = forward(runner._params, runner._pools, words, last)
        rows.append(np.asarray(logits)[0].astype(np.float64))
    table = np.array(rows)
    table -= table.max(axis=1, keepdims=True)
    result: np.ndarray = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    return result


def assert_right(kernels: str, length: int, found: PromptLogprobs) -> None:
    wanted, tokens = oracle(kernels, length), prompt_of(length)
    order = np.argsort(-wanted, axis=1, kind="stable")[:, :3]
    own = wanted[np.arange(length - 1), list(tokens[1:])]
    np.testing.assert_allclose(found.logprobs, own, atol=1e-4)
    assert np.array_equal(found.top_ids, order)
    likeliest = np.take_along_axis(wanted, order, axis=1)
    np.testing.assert_allclose(found.top_logprobs, likeliest, atol=1e-4)
    assert (found.logprobs.dtype, found.top_ids.dtype) == (np.float32, np.int32)


def bits(found: PromptLogprobs) -> tuple[bytes, ...]:
    return tuple(a.tobytes() for a in (found.logprobs, found.top_ids, found.top_logprobs))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("length", [2, 31, LONG])
def test_they_are_the_log_softmax_of_the_logits(kernels: str, length: int) -> None:
    """A prompt longer than what is scored at once, too."""
    assert_right(kernels, length, scored(runner_of(kernels), length))


@pytest.mark.parametrize("most", [5, 17, 64, 65])
def test_chunks_change_nothing(most: int) -> None:
    runner = runner_of("auto")
    found = scored(runner, LONG, max_batch_tokens=most)
    assert_right("auto", LONG, found)
    if "cpu" in runner._programs._kernels.name:  # bit for bit, as all that they compute
        assert bits(found) == bits(scored(runner, LONG))


def test_a_prefill_worker_tells_them_and_a_decode_worker_none() -> None:
    found = scored(runner_of("auto", Role.PREFILL), LONG, Role.PREFILL, max_batch_tokens=24)
    assert_right("auto", LONG, found)
    engine = tiny_engine(runner_of("auto", Role.DECODE))
    engine.submit(Add(asked(LONG, Role.DECODE)))
    assert not [e for e in run(engine) if isinstance(e, PromptLogprobs)]


def test_together_is_as_alone() -> None:
    """Beside prompts and decoding rows that want none; the first token is never told of."""
    runner = runner_of("auto")
    engine = tiny_engine(runner)
    lengths = (30, 1, 12, 47)
    for length in lengths:
        engine.submit(Add(asked(length)))
        plain = request(f"plain{length}", prompt_of(length + 5), temperature=0.0, max_tokens=6)
        engine.submit(Add(plain))
    events = run(engine)
    told = {e.id.attempt.request_id for e in events if isinstance(e, PromptLogprobs)}
    assert told == {"30", "12", "47"}
    for length in (30, 12, 47):
        assert_right("auto", length, scores_in(events, f"{length}"))


def test_a_resumed_prompt_is_told_of_again_and_the_output_is_not() -> None:
    engine = tiny_engine(runner_of("auto"))
    resumed = request(
        "again", prompt_of(20), output=(3, 4, 5), temperature=0.0, max_tokens=9, prompt_logprobs=3
    )
    engine.submit(Add(resumed))
    assert_right("auto", 20, scores_in(run(engine), "again"))


def test_sharded_vocabularies() -> None:
    assert_right("auto", LONG, scored(runner_of("auto", shards=2), LONG))


def test_a_row_of_one_token_may_have_a_target() -> None:
    """Whatever a scheduler leaves over of a step, also where all rows have one token."""
    runner, tokens = runner_of("auto"), prompt_of(2)
    table = np.arange(1, dtype=np.int32)
    name = SequenceId(AttemptId("one", 0), 0)
    row = BatchRow(name, tokens[:1], 0, table, 0, None, tokens[1:], 3)
    outcome = runner.run(StepPlan((RunBatch((row,)),)))
    assert_right("auto", 2, outcome.prompt_logprobs[name])


def test_the_fake_model_tells_positions_and_what_it_would_have_said() -> None:
    engine = make_engine()
    prompt = (5, 3, 8, 90, 2)
    engine.submit(Add(request("r", prompt, prompt_logprobs=2)))
    found = scores_in(run(engine), "r")
    assert found.logprobs.tolist() == [-1, -2, -3, -4]
    assert found.top_ids.tolist() == [list(expected(prompt[:n], 1)) for n in range(1, 5)]
    assert found.top_logprobs.tolist() == [[0.0]] * 4


def test_nothing_but_a_request_for_them_needs_all_logits() -> None:
    assert asked(3).sampling.needs_all_logits
    assert asked(3, best=0).sampling.needs_all_logits
    assert not request("r", (1,), top_logprobs=2).sampling.needs_all_logits
