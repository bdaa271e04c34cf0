"""Workers with a few blocks each never wait for one another for ever.

A prefill worker admits a prompt with all its blocks; the decode worker queues the sequence
only then. So whatever a decode worker holds blocks for has a source that will be computed,
and whatever a prefill worker exports will be fetched.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from engine.engine import Engine
from engine.events import (
    Abort,
    Add,
    Admitted,
    BeginDecode,
    Computed,
    Event,
    KVRead,
    KVWritten,
    Prefilled,
    ReadKV,
    ReleaseExport,
    WriteKV,
)
from engine.types import Failure, FailureCode, Role, SequenceRequest, TokenDelta
from tests.engine.helpers import answer, make_engine, request

PIECE = 5
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Job:
    """A request of `length` prompt tokens, and the workers that serve it."""

    length: int
    max_tokens: int
    prefill: int
    decode: int


class Handoffs:
    """Two prefill and two decode engines, and what moves KV between them.

    A job that is preempted becomes a new one, which goes on from its tokens. With `eager`,
    decode workers queue every sequence at once, as they must not. `fraction` is what the prefill
    workers may export.
    """

    def __init__(
        self,
        jobs: list[Job],
        decode_order: list[int],
        blocks: int,
        eager: bool,
        fraction: float = 1.0,
    ) -> None:
        limits: dict[str, float] = {"max_waiting": len(jobs), "max_model_len": 16}
        exports = limits | {"max_exported_fraction": fraction}
        self.prefill = [make_engine(blocks, BLOCK_SIZE, **exports) for _ in range(2)]
        self.decode = [make_engine(blocks, BLOCK_SIZE, **limits) for _ in range(2)]
        self.jobs = list(jobs)
        self.origin = list(range(len(jobs)))
        """Of each job the one that it goes on with."""
        self.prior: list[tuple[int, ...]] = [()] * len(jobs)
        self.preempted: set[int] = set()
        self.computed: Counter[int] = Counter()
        self.asked: Counter[int] = Counter()
        self.written: Counter[int] = Counter()
        self.importing: set[int] = set()
        self.first: dict[int, TokenDelta] = {}
        self.output: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(jobs)), ())
        self.done: set[int] = set()
        self.eager = eager
        for number, job in enumerate(jobs):
            self.prefill[job.prefill].submit(Add(self.request(number, Role.PREFILL)))
        for number in decode_order if eager else ():
            self.decode[jobs[number].decode].submit(Add(self.request(number, Role.DECODE)))

    def request(self, number: int, roles: Role) -> SequenceRequest:
        job = self.jobs[number]
        prompt = tuple((self.origin[number] + 7 * i) % 50 for i in range(job.length))
        return request(
            str(number), prompt, roles, str(number).encode(), self.prior[number],
            max_tokens=job.max_tokens,
        )  # fmt: skip

    def run(self, rounds: int) -> None:
        """Until every job is done, or for `rounds`."""
        for _ in range(rounds):
            if len(self.done) == len(self.output):
                return
            for engine in (*self.prefill, *self.decode):
                for event in engine.step().events:
                    self.take(event, engine)
            for number in self.importing - self.preempted:
                if self.origin[number] not in self.done:
                    self.pull(number)

    def pull(self, number: int) -> None:
        job = self.jobs[number]
        start, stop = self.asked[number], min(self.asked[number] + PIECE, self.computed[number])
        if start < stop:
            self.asked[number] = stop
            self.prefill[job.prefill].submit(ReadKV(number, str(number).encode(), start, stop))

    def again(self, number: int) -> None:
        """Its decode worker gave its blocks to older ones."""
        self.preempted.add(number)
        job = self.jobs[number]
        self.prefill[job.prefill].submit(Abort(self.request(number, Role.PREFILL).id.attempt))
        self.jobs.append(job)
        self.origin.append(self.origin[number])
        self.prior.append(self.output[self.origin[number]])
        self.prefill[job.prefill].submit(Add(self.request(len(self.jobs) - 1, Role.PREFILL)))

    def take(self, event: Event, engine: Engine) -> None:
        prefills = engine in self.prefill
        match event:
            case Admitted(id) if prefills:
                number = int(id.attempt.request_id)
                if not self.eager:
                    decode = self.decode[self.jobs[number].decode]
                    decode.submit(Add(self.request(number, Role.DECODE)))
            case Admitted(id):
                self.importing.add(int(id.attempt.request_id))
            case Computed(transfer_id, tokens):
                self.computed[int(transfer_id)] = tokens
            case Prefilled(transfer_id, first):
                self.first[int(transfer_id)] = first
                self.output[self.origin[int(transfer_id)]] += first.tokens
                if first.finish is not None:
                    self.end(int(transfer_id))
                    self.decode[self.jobs[int(transfer_id)].decode].submit(Abort(first.id.attempt))
            case Failure(attempt, code):
                assert code is FailureCode.PREEMPTED
                assert not prefills
                self.again(int(attempt.request_id))
            case KVRead(number) | KVWritten(number) if number in self.preempted:
                pass
            case KVRead(number, arrays):
                assert arrays is not None
                id = self.request(number, Role.DECODE).id
                start = self.written[number]
                self.written[number] += arrays[0].shape[1]
                write = WriteKV(number, id, start, self.written[number], arrays)
                self.decode[self.jobs[number].decode].submit(write)
            case KVWritten(number, ok):
                assert ok
                job = self.jobs[number]
                if self.written[number] == job.length + len(self.prior[number]):
                    self.prefill[job.prefill].submit(ReleaseExport(str(number).encode()))
                    first = self.first[number]
                    self.decode[job.decode].submit(BeginDecode(first.id, first.tokens[0]))
            case TokenDelta(id) if not prefills:
                number = int(id.attempt.request_id)
                output = self.output[self.origin[number]]
                assert event.index == len(output)
                self.output[self.origin[number]] = output + event.tokens
                if event.finish is not None:
                    self.end(number)

    def end(self, number: int) -> None:
        assert self.origin[number] not in self.done
        self.done.add(self.origin[number])


def job_lists() -> st.SearchStrategy[list[Job]]:
    worker = st.integers(0, 1)
    job = st.builds(Job, st.integers(1, 12), st.integers(1, 12), worker, worker)
    return st.lists(job, min_size=1, max_size=10)


@settings(max_examples=60, deadline=None)
@given(
    jobs=job_lists(),
    blocks=st.integers(4, 6),
    fraction=st.sampled_from([0.01, 0.25, 0.5, 0.75, 1.0]),
)
def test_all_requests_end_with_a_few_blocks(jobs: list[Job], blocks: int, fraction: float) -> None:
    handoffs = Handoffs(jobs, [], blocks, eager=False, fraction=fraction)
    handoffs.run(rounds=120 * len(jobs))
    for number in range(len(jobs)):
        asked = handoffs.request(number, Role.DECODE)
        assert handoffs.output[number] == answer(asked, max_model_len=16)[0]
    for engine in (*handoffs.prefill, *handoffs.decode):
        engine.step()
        assert engine.load().free_blocks == blocks


def test_reserving_before_the_prefill_is_admitted_would_lock_up() -> None:
    """The property above can fail: opposite orders lock up workers that reserve at once."""
    jobs = [Job(12, 2, number % 2, number % 2) for number in range(6)]
    eager = Handoffs(jobs, [5, 4, 3, 2, 1, 0], blocks=4, eager=True)
    eager.run(rounds=400)
    assert not eager.done
    for fraction in (1.0, 0.01):
        patient = Handoffs(jobs, [], blocks=4, eager=False, fraction=fraction)
        patient.run(rounds=400)
        assert len(patient.done) == 6
