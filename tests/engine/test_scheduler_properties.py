"""Any order of commands and steps keeps the books right and the answers exact."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from engine.engine import Engine
from engine.events import (
    Abort,
    Add,
    Admitted,
    BeginDecode,
    CacheChanged,
    Computed,
    Event,
    KVRead,
    KVWritten,
    Prefilled,
    ReadKV,
    Rejected,
    ReleaseExport,
    WriteKV,
)
from engine.pace import Pace
from engine.plan import RunBatch
from engine.programs import Extent, Paddings, program_shapes, smallest
from engine.types import (
    COLOCATED,
    Failure,
    FailureCode,
    Load,
    Role,
    SequenceRequest,
    TokenDelta,
)
from tests.engine.helpers import (
    LIMITS,
    VOCAB,
    Ahead,
    OneByOne,
    answer,
    kv_of,
    make_engine,
    request,
)

BLOCKS, BLOCK_SIZE = 12, 4
SHAPES = program_shapes(
    COLOCATED,
    Extent(
        max_prefill_tokens=LIMITS["max_batch_tokens"],
        max_prefill_seqs=LIMITS["max_prefill_seqs"],
        max_decode_seqs=LIMITS["max_seqs"],
        max_blocks=LIMITS["max_model_len"] // BLOCK_SIZE,
    ),
    Paddings(prefill_len=16, prefill_seqs=1, decode_seqs=1, decode_blocks=4),
)
MOST_STEPS_TO_ANSWER = 60
LONGEST = 30  # tokens of a prompt

tokens = st.integers(0, VOCAB - 1)
pick = st.integers(0, 10_000)  # an index into whatever there is by then


@dataclass
class Served:
    """What the machine knows of one sequence."""

    request: SequenceRequest
    output: list[int]
    admitted: bool = False
    reused: int = 0
    computed: int = 0
    written: int = 0
    begun: bool = False
    ended: bool = False
    impostor: bool = False  # asks for a transfer that is another's


@dataclass
class Read:
    served: Served
    start: int
    stop: int
    may_fail: bool


class EngineMachine(RuleBasedStateMachine):
    hit_tokens: int | None = None
    max_batch_tokens = LIMITS["max_batch_tokens"]
    pace: type[Pace] = Ahead
    interleave = False

    def __init__(self) -> None:
        super().__init__()
        limits: dict[str, float] = {
            "max_waiting": 5,
            "max_batch_tokens": self.max_batch_tokens,
            "interleave_prefills": self.interleave,
        }
        self.engine = self.make_engine(**limits)
        self.cached: set[int] = set()
        self.numbers = itertools.count()
        self.served: dict[str, Served] = {}
        self.reads: dict[int, Read] = {}
        self.writes: dict[int, tuple[Served, int, np.ndarray, bool | None]] = {}
        scheduler = self.engine._scheduler
        schedule = scheduler.schedule

        def schedule_what_fits_a_program() -> object:
            plan = schedule()
            for entry in plan.entries:
                if isinstance(entry, RunBatch):
                    lengths = [len(row.tokens) for row in entry.rows]
                    blocks = max(len(row.blocks) for row in entry.rows)
                    for row in entry.rows:
                        roles = self.served[row.id.attempt.request_id].request.roles
                        assert len(row.tokens) == 1 or roles is not Role.DECODE
                    assert sorted(length > 1 for length in lengths) == [n > 1 for n in lengths]
                    smallest(SHAPES, sum(lengths), len(lengths), blocks)
            return plan

        scheduler.schedule = schedule_what_fits_a_program  # type: ignore[method-assign]

    def make_engine(self, **limits: float) -> Engine:
        return make_engine(
            BLOCKS, BLOCK_SIZE, pace=self.pace(), hit_tokens=self.hit_tokens, **limits
        )

    def answer(self, asked: SequenceRequest) -> tuple[tuple[int, ...], object]:
        return answer(asked)

    def windowed_from(self, asked: SequenceRequest) -> int:
        """The first token whose KV windowed layers hand over."""
        return 0

    def handed_from(self, asked: SequenceRequest) -> int:
        """The first token whose KV any layers hand over."""
        return 0

    def choose(self, index: int, roles: Role | None = None) -> Served | None:
        """One of the sequences with `roles`; mostly one that has not ended."""
        fitting = [
            s
            for s in self.served.values()
            if roles in (None, s.request.roles) and not (roles is Role.PREFILL and s.impostor)
        ]
        live = [s for s in fitting if not s.ended]
        if live and index % 8:
            fitting = live
        return fitting[index % len(fitting)] if fitting else None

    # ---- commands ----

    @rule(
        roles=st.sampled_from([COLOCATED, Role.PREFILL, Role.DECODE]),
        prompt=st.one_of(
            st.lists(tokens, min_size=1, max_size=1), st.lists(tokens, min_size=2, max_size=LONGEST)
        ),
        before=st.one_of(st.none(), pick),
        kept=st.integers(1, LONGEST),
        produced=st.integers(0, 3),
        max_tokens=st.integers(1, 12),
        stops=st.frozensets(tokens, max_size=5),
    )
    def add(
        self,
        roles: Role,
        prompt: list[int],
        before: int | None,
        kept: int,
        produced: int,
        max_tokens: int,
        stops: frozenset[int],
    ) -> None:
        if before is not None and (earlier := self.choose(before)) is not None:
            # Often the next turn of a chat, or another's with the same system prompt.
            asked = earlier.request
            whole = asked.prompt if asked.output else (*asked.prompt, *earlier.output)
            prompt = [*whole[:kept], *prompt][:LONGEST]
        number = next(self.numbers)
        name, transfer = f"r{number}", b"" if roles is COLOCATED else b"t%d" % number
        arguments = {"max_tokens": max_tokens, "stop_token_ids": stops}
        whole, _ = self.answer(request(name, tuple(prompt), **arguments))
        resumed = whole[: min(produced, len(whole) - 1)]
        group = self.group_of(number)
        asked = request(name, tuple(prompt), roles, transfer, resumed, group=group, **arguments)
        self.served[name] = Served(asked, list(resumed))
        self.engine.submit(Add(asked))

    def group_of(self, number: int) -> bytes:
        """Of the sequence of that number, which is alone in it as yet."""
        return b""

    @rule(index=pick)
    def add_again(self, index: int) -> None:
        served = self.choose(index)
        if served is None or served.ended or served.impostor:
            return
        if not served.begun:  # which may end it before this is taken
            self.engine.submit(Add(served.request))

    @rule(index=pick)
    def add_for_a_transfer_in_use(self, index: int) -> None:
        served = self.choose(index, Role.PREFILL)
        if served is None or served.ended or not served.admitted:
            return
        name = f"r{next(self.numbers)}"
        asked = request(name, (1,), Role.PREFILL, served.request.transfer_id)
        self.served[name] = Served(asked, [], impostor=True)
        self.engine.submit(Add(asked))

    @rule(index=pick, release=st.booleans())
    def end(self, index: int, release: bool) -> None:
        """Abort, or release a transfer; both may come late, twice or early."""
        served = self.choose(index)
        if served is None:
            return
        asked = served.request
        if not release:
            served.ended = True
            self.engine.submit(Abort(asked.id.attempt))
        elif asked.roles is Role.PREFILL and served.admitted and not served.impostor:
            served.ended = True
            self.engine.submit(ReleaseExport(asked.transfer_id))

    @rule(index=pick, start=st.integers(-1, 40), count=st.integers(0, 40), wild=st.booleans())
    def read(self, index: int, start: int, count: int, wild: bool) -> None:
        """A piece of what has been computed; or anything at all."""
        served = self.choose(index, Role.PREFILL)
        if served is None:
            return
        computed, first = served.computed, self.handed_from(served.request)
        if computed > first and not wild:
            start = first + start % (computed - first)
            count = 1 + count % (computed - start)
        number = next(self.numbers)
        seen = self.windowed_from(served.request)
        stop, windowed = start + count, start >= seen
        if not windowed and not wild:
            stop = min(stop, seen)
        bad = not first <= start < stop <= computed
        self.reads[number] = Read(served, start, stop, bad)
        self.engine.submit(
            ReadKV(number, served.request.transfer_id, start, stop, windowed=windowed)
        )

    @rule(index=pick, count=st.integers(1, 12), repeat=st.booleans())
    def write(self, index: int, count: int, repeat: bool) -> None:
        """The next piece of an import; or the last one again, or to one that is over."""
        served = self.choose(index, Role.DECODE)
        if served is not None:
            self.write_to(served, count, repeat)

    def write_to(self, served: Served, count: int, repeat: bool) -> None:
        known = served.request.known_tokens
        start = max(served.written - count, 0) if repeat else served.written
        seen = self.windowed_from(served.request)
        windowed = start >= seen
        stop = start + count if windowed else min(start + count, seen)
        piece = known[start:stop] or (1,)  # or one past the end
        good: bool | None = not served.begun and served.reused <= start < len(known)
        if good and not served.admitted:
            good = None  # it may be admitted by the time that this is taken
        if good and start < self.handed_from(served.request):
            good = None  # its block may begin before what is seen
        arrays = kv_of(piece)
        number = next(self.numbers)
        self.writes[number] = (served, start + len(piece), arrays[0], good)
        self.engine.submit(
            WriteKV(number, served.request.id, start, start + len(piece), arrays, windowed)
        )
        if good and not served.ended:
            served.written = max(served.written, start + len(piece))

    @rule(index=pick, count=st.integers(3, 12))
    def import_all(self, index: int, count: int) -> None:
        """An import from its first piece to its begin."""
        served = self.choose(index, Role.DECODE)
        if served is None or served.ended:
            return
        for _ in range(30):
            if not served.admitted or served.written == len(served.request.known_tokens):
                break
            self.write_to(served, count, repeat=False)
        self.one_step()
        self.one_step()
        self.one_step()
        self.begin_on(served)

    @rule(index=pick)
    def begin(self, index: int) -> None:
        """Begin when all has been written; or once more, which is ignored."""
        served = self.choose(index, Role.DECODE)
        if served is not None:
            self.begin_on(served)

    def begin_on(self, served: Served) -> None:
        asked = served.request
        pending = any(each[0] is served for each in self.writes.values())
        if served.written < len(asked.known_tokens) or pending:
            return
        whole, _ = self.answer(asked)
        if not served.begun and not served.ended:
            served.begun = True
            served.output.append(whole[len(asked.output)])
        self.engine.submit(BeginDecode(asked.id, whole[len(asked.output)]))

    # ---- steps ----

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    @precondition(lambda self: self.reads or self.writes)
    @rule()
    def answers_come_soon(self) -> None:
        for _ in range(MOST_STEPS_TO_ANSWER):
            self.one_step()
        assert not self.reads
        assert not self.writes

    def one_step(self) -> None:
        result = self.engine.step()
        self.engine.check_invariants()
        for event in result.events:
            self.take(event)
        load = result.load
        blocks = load.free_blocks + load.cached_blocks + load.running_blocks + load.exported_blocks
        assert blocks == BLOCKS
        self.check_cache(load)

    def check_cache(self, load: Load) -> None:
        assert not load.cached_blocks
        assert not self.cached

    def take(self, event: Event) -> None:
        match event:
            case Admitted(id):
                served = self.served[id.attempt.request_id]
                assert event.tokens == len(served.request.known_tokens)
                served.admitted, served.reused = True, event.reused
                first = self.handed_from(served.request)
                served.written = max(served.written, event.reused, first)
            case CacheChanged(added, evicted):
                assert len(set(added)) == len(added)
                assert self.cached.issuperset(evicted)
                self.cached.difference_update(evicted)
                assert self.cached.isdisjoint(added)
                self.cached.update(added)
            case Computed(transfer_id, count):
                served = self.exporter(transfer_id)
                assert served.computed < count <= len(served.request.known_tokens)
                served.computed = count
            case TokenDelta():
                self.take_delta(event)
            case Prefilled(transfer_id, first):
                served = self.exporter(transfer_id)
                assert first.tokens == (served.output[-1],)
            case KVRead(read_id, arrays):
                read = self.reads.pop(read_id)
                if arrays is None:
                    assert read.may_fail or read.served.ended
                else:
                    known = read.served.request.known_tokens
                    assert arrays[0].ravel().tolist() == list(known[read.start : read.stop])
            case KVWritten(import_id, ok):
                served, _, array, good = self.writes.pop(import_id)
                assert ok or served.ended or not good
                assert good is not False or not ok
                array[:] = -1  # the engine may not look at it any more
            case Failure(attempt, code):
                self.take_failure(self.served[attempt.request_id], code)
            case Rejected(attempt):
                served = self.served[attempt.request_id]
                assert not served.admitted
                served.ended = True

    def exporter(self, transfer_id: bytes) -> Served:
        (served,) = (
            s for s in self.served.values() if s.request.transfer_id == transfer_id and s.admitted
        )
        return served

    def take_delta(self, delta: TokenDelta) -> None:
        served = self.served[delta.id.attempt.request_id]
        assert delta.index == len(served.output)
        asked = served.request
        multiple = self.hit_tokens
        if multiple and delta.index == len(asked.output) and asked.roles is not Role.DECODE:
            most = min(served.reused, len(asked.prompt))
            assert delta.cached_tokens == most // multiple * multiple
        else:
            assert not delta.cached_tokens
        served.output += delta.tokens
        whole, reason = self.answer(served.request)
        assert tuple(served.output) == whole[: len(served.output)]
        over = len(served.output) == len(whole)
        assert delta.finish == (reason if over else None)
        served.ended |= over

    def take_failure(self, served: Served, code: FailureCode) -> None:
        if code is FailureCode.PREEMPTED:
            assert served.admitted
            assert served.request.roles is not Role.PREFILL
        elif served.begun:  # its first token was its last
            assert code is FailureCode.TRANSFER
            assert tuple(served.output) == self.answer(served.request)[0]
        else:  # only a second user of a transfer_id, or too many blocks
            assert code is FailureCode.INVALID
            assert not served.admitted
            assert served.impostor
        served.ended = True

    def teardown(self) -> None:
        for served in self.served.values():
            served.ended = True
            self.engine.submit(Abort(served.request.id.attempt))
        for _ in range(2):  # and the one that was under way
            self.one_step()
        assert not self.reads
        assert not self.writes
        load = self.engine.load()
        assert (load.free_blocks + load.cached_blocks, load.running, load.waiting) == (BLOCKS, 0, 0)
        assert not self.engine._scheduler.has_work


class ChunkingMachine(EngineMachine):
    """Steps that are shorter than most prompts."""

    max_batch_tokens = LIMITS["max_seqs"] + 3


class InterleavingMachine(ChunkingMachine):
    """Prompts take turns."""

    interleave = True


class OneByOneMachine(EngineMachine):
    """Each step is committed before anything else is asked."""

    pace = OneByOne

    def one_step(self) -> None:
        super().one_step()
        if self.engine._running is not None:
            super().one_step()


class Cached:
    """Prompts share prefixes, and what has been computed of one is not computed again."""

    hit_tokens = BLOCK_SIZE

    def check_cache(self, load: Load) -> None:
        """What the events say, and what the pool holds."""
        cache = self.engine._scheduler._reuse._cache  # type: ignore[attr-defined]
        assert set(cache.hashes) == self.cached  # type: ignore[attr-defined]
        pool = self.engine._runner._pool.reshape(-1, BLOCK_SIZE)  # type: ignore[attr-defined]
        for entry in cache._entries.values():
            assert pool[entry.block].astype("<i4").tobytes() == entry.piece


class CachedMachine(Cached, EngineMachine):
    pass


class CachedChunkingMachine(Cached, ChunkingMachine):
    hit_tokens = 2 * BLOCK_SIZE


class CachedOneByOneMachine(Cached, OneByOneMachine):
    pass


TestEngineMachine = EngineMachine.TestCase
TestChunkingMachine = ChunkingMachine.TestCase
TestInterleavingMachine = InterleavingMachine.TestCase
TestOneByOneMachine = OneByOneMachine.TestCase
TestCachedMachine = CachedMachine.TestCase
TestCachedChunkingMachine = CachedChunkingMachine.TestCase
TestCachedOneByOneMachine = CachedOneByOneMachine.TestCase
TestEngineMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestChunkingMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestInterleavingMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestOneByOneMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestCachedMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestCachedChunkingMachine.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None
)
TestCachedOneByOneMachine.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None
)
