"""Whatever a router orders of a worker: it is refused or computed, and the engine lives on.

Every field of Start is drawn, as a peer that is not ours could send it, and goes by way of the
session server into a real scheduler. The fake model computes; what the devices would be given
beside tokens and blocks is packed as for them.
"""

from __future__ import annotations

import contextlib
import itertools
import math

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, given, settings

from engine.batches import pack_sampling
from engine.engine import Engine
from engine.events import Abort, Add, Admitted, BeginDecode, Event, KVWritten, WriteKV
from engine.fake import FakeRunner
from engine.plan import LoadTokenCounts, RunBatch, StepOutcome, StepPlan
from engine.sampling import BIASES
from engine.types import (
    COLOCATED,
    AttemptId,
    Load,
    ModelLimits,
    Role,
    SequenceId,
    SequenceRequest,
)
from protos import worker_pb2 as wire
from protos.codec import StartOrder, WorkerInfo
from protos.errors import WireError
from protos.session_server import SessionServer, _Session
from protos.token_codec import pack_tokens
from protos.transfer_codec import Transfers
from tests.engine.helpers import LIMITS, VOCAB, answer, kv_of, make_engine, output_of, request, run

BLOCKS, BLOCK_SIZE = 24, 4
LONGEST = LIMITS["max_model_len"]

u32 = st.integers(0, 2**32 - 1) | st.sampled_from([0, VOCAB, 2**31 - 1, 2**31, 2**32 - 1])
f32 = st.floats(width=32) | st.sampled_from([-0.0, -1.0, 1e-45, 3e38, math.inf, math.nan])
token = st.integers(0, VOCAB - 1)


def some(each: st.SearchStrategy, least: int, most: int) -> st.SearchStrategy[list]:
    return st.lists(each, min_size=least, max_size=most)


FINE: dict[str, st.SearchStrategy] = {
    "temperature": st.floats(0, 2, width=32), "top_k": st.integers(0, 200),
    "top_p": st.just(1.0) | st.just(0.5), "min_p": st.just(0.0) | st.just(0.5),
    "presence_penalty": st.just(0.0) | st.just(0.5), "frequency_penalty": st.just(0.0),
    "repetition_penalty": st.just(1.0) | st.just(1.5), "seed": st.integers(0, 2**64 - 1),
    "max_tokens": st.integers(3, 50), "min_tokens": st.integers(0, 3),
    "stop_token_ids": some(token, 0, 4), "top_logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
}  # fmt: skip
WILD: dict[str, st.SearchStrategy] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty"), f32),
    **dict.fromkeys(("frequency_penalty", "repetition_penalty"), f32),
    **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "top_logprobs", "prompt_logprobs"), u32),
    "stop_token_ids": some(u32, 0, 4),
}
"""Fields of Sampling, as they may be and as they may come."""


@st.composite
def fine_starts(draw: st.DrawFn) -> wire.Start:
    """What can be computed, but for what two of them have in common."""
    roles = draw(st.integers(1, 3))
    left_out = draw(st.sets(st.sampled_from(["top_logprobs", "prompt_logprobs", "min_tokens"])))
    biased = draw(st.sets(token, max_size=4))
    sampling = wire.Sampling(
        bias_ids=biased,
        bias_values=[draw(st.floats(-9, 9, width=32)) for _ in biased],
        **{name: draw(each) for name, each in FINE.items() if name not in left_out},
    )
    output = draw(some(token, 0, 2))
    return wire.Start(
        request_id=draw(st.sampled_from("abc")),
        attempt=draw(st.integers(0, 1)),
        roles=roles,
        prompt=pack_tokens(draw(some(token, 1, LONGEST - 3))),
        choices=[wire.Choice(output=pack_tokens(output))],
        sampling=sampling,
        transfer_id=b"" if roles == COLOCATED.value else bytes([draw(st.integers(0, 2))]) * 16,
        sources=draw(some(st.text(max_size=5), 0, 2)),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
    )


@st.composite
def starts(draw: st.DrawFn) -> wire.Start:
    """A fine one, of which up to two fields are anything at all."""
    message = draw(fine_starts())
    of_start = ("attempt", "roles", "prompt", "choices", "transfer_id", "biases")
    for name in draw(some(st.sampled_from([*WILD, *of_start]), 0, 2)):
        harm(draw, message, name)
    return message


def harm(draw: st.DrawFn, message: wire.Start, name: str) -> None:
    sampling = message.sampling
    wild_tokens = some(u32, 0, LONGEST + 5).map(pack_tokens) | st.binary(max_size=9)
    match name:
        case "stop_token_ids":
            sampling.stop_token_ids.extend(draw(WILD[name]))
            sampling.min_tokens = draw(st.integers(0, 3))
        case "biases":
            sampling.bias_ids.extend(draw(some(u32, 0, 3)))
            sampling.bias_values.extend(draw(some(f32, 0, 3)))
        case "attempt" | "roles":
            setattr(message, name, draw(u32))
        case "prompt":
            message.prompt = draw(wild_tokens)
        case "transfer_id":
            message.transfer_id = draw(st.binary(max_size=17))
        case "choices":
            message.choices[0].choice = draw(u32)
            message.choices[0].output = draw(wild_tokens)
            if draw(st.booleans()):
                message.choices.add(choice=draw(u32))
        case _:
            setattr(sampling, name, draw(WILD[name]))


class PackingRunner(FakeRunner):
    """Packs what the devices are given of how rows sample, and throws it away."""

    def run(self, plan: StepPlan) -> StepOutcome:
        for entry in plan.entries:
            if isinstance(entry, LoadTokenCounts):
                assert len(set(entry.prompt)) + len(entry.output) <= LONGEST
                np.array([*entry.prompt, *entry.output], np.int32)
            elif isinstance(entry, RunBatch):
                pack_sampling(entry.rows, len(entry.rows))
        outcome = super().run(plan)
        assert all(len(ids) <= BIASES for ids in self._biases.values())
        return outcome


class Orders:
    """The WorkerService behind the session server: every order becomes the engine's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.taken: dict[SequenceId, SequenceRequest] = {}

    def start(self, order: StartOrder) -> None:
        for sequence in order.sequences:
            self.taken[sequence.id] = sequence
            self.engine.submit(Add(sequence))

    def abort(self, attempt: AttemptId) -> None:
        self.engine.submit(Abort(attempt))

    def drain_asked(self) -> None: ...

    def load(self) -> Load:
        return self.engine.load()

    def transfers(self) -> Transfers:
        return {}


class Worker:
    """A worker of both roles, whose imports arrive at once."""

    def __init__(self, hit_tokens: int | None) -> None:
        runner = PackingRunner(BLOCKS, BLOCK_SIZE, VOCAB)
        self.engine = make_engine(BLOCKS, BLOCK_SIZE, runner, hit_tokens=hit_tokens)
        self.orders = Orders(self.engine)
        limits = ModelLimits("m", VOCAB, LONGEST, BLOCK_SIZE, BLOCKS, LIMITS["max_seqs"])
        self.sessions = SessionServer(WorkerInfo(1, COLOCATED, limits, ()), self.orders)
        self.session = _Session(set())
        self._imports: dict[int, SequenceId] = {}
        self._numbers = itertools.count()

    def step(self, first_token: int) -> None:
        for event in self.engine.step().events:
            self._take(event, first_token)

    def _take(self, event: Event, first_token: int) -> None:
        match event:
            case Admitted(id, _, count, reused) if self.orders.taken[id].roles is Role.DECODE:
                number = next(self._numbers)
                self._imports[number] = id
                arrays = kv_of(self.orders.taken[id].known_tokens[reused:count])
                self.engine.submit(WriteKV(number, id, reused, count, arrays))
            case KVWritten(number, True):
                self.engine.submit(BeginDecode(self._imports[number], first_token))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(starts(), token | u32), min_size=1, max_size=5),
    st.sampled_from([None, BLOCK_SIZE]),
)
def test_an_engine_outlives_whatever_is_ordered(
    messages: list[tuple[wire.Start, int]], hit_tokens: int | None
) -> None:
    worker = Worker(hit_tokens)
    for message, first_token in messages:
        start(worker, message)
        worker.step(first_token)
    for _ in range(3 * LONGEST):
        if not worker.engine._scheduler.has_work and worker.engine._commands.empty():
            break
        worker.step(messages[0][1])
    for id in worker.orders.taken:
        worker.engine.submit(Abort(id.attempt))
    run(worker.engine)
    load = worker.engine.load()
    assert (load.free_blocks + load.cached_blocks, load.running, load.waiting) == (BLOCKS, 0, 0)
    after = request("after", (5, 3), max_tokens=4)
    worker.engine.submit(Add(after))
    assert output_of(run(worker.engine), "after") == answer(after)[0]


def start(worker: Worker, message: wire.Start) -> None:
    with contextlib.suppress(WireError):  # a name that is none costs the session
        worker.sessions._start(message, worker.session)


def test_held_stops_outside_of_the_vocabulary_are_refused_and_not_computed() -> None:
    for wrong in (VOCAB, 2**31 - 1, 2**31, 2**32 - 1):
        worker = Worker(None)
        sampling = wire.Sampling(top_p=1.0, repetition_penalty=1.0, max_tokens=3, min_tokens=1)
        sampling.stop_token_ids.append(wrong)
        message = wire.Start(request_id="r", roles=3, prompt=pack_tokens((1, 2)), sampling=sampling)
        message.choices.add()
        start(worker, message)
        events = worker.engine.step().events
        told = [*worker.session.outbox._failed, *events]
        assert len(told) == 1, wrong
        assert "stop" in str(told[0])
