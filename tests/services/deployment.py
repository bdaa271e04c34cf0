"""A whole deployment in one process: worker hosts on the fake model, and a dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from deploy.addresses import parse_address
from deploy.worker_host import WorkerHost
from engine.block_hash import root_hash
from engine.blocks import BlockPool
from engine.build import BuiltEngine, KVArray
from engine.engine import Engine
from engine.fake import FakeRunner, next_token
from engine.limits import Limits
from engine.plan import ImportKV, RunBatch, StepOutcome, StepPlan
from engine.prefix_cache import PrefixCache
from engine.scheduler import Scheduler
from engine.types import COLOCATED, FinishReason, ModelLimits, Role, SamplingParams, TokenDelta
from kvtransfer import KVSource
from kvtransfer.array_transfer import ArrayTransfer
from router.dispatch import Dispatcher
from router.siblings import Siblings
from router.workers import WorkerPool

EACH_TRANSPORT = (("device",), ("shm",), ("jax",), ("grpc",))
TOPOLOGIES = ("1,1", "2,1", "1,2", "3,1", "colocated")
VOCAB = 97
MAX_MODEL_LEN = 64
BLOCK_SIZE = 4
CHUNK_TOKENS = 8


@functools.cache
def array_transfer(roles: Role) -> ArrayTransfer:
    """An end of jax.experimental.transfer; a process keeps it for good."""
    return ArrayTransfer("127.0.0.1", jax.devices()[:1])


async def eventually(predicate: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """For what nothing announces: poll until `predicate()` holds."""
    async with asyncio.timeout(timeout_s):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """The fake model's next `count` tokens, by hand."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """A prompt that no other salt gives."""
    return tuple((7 * i + 13 * salt + 5) % VOCAB for i in range(length))


class GatedRunner(FakeRunner):
    """Its forward passes wait while the gate is shut. A step may also be made to raise."""

    def __init__(self, num_blocks: int, step_s: float) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, VOCAB, step_s)
        self.fault: Exception | None = None
        self.held = False  # a forward pass waits at the gate
        self.spans: list[tuple[int, int]] = []  # first token and end of each row that was computed
        self.imported = 0  # tokens whose KV has come from elsewhere
        self._condition = threading.Condition()
        self._passes: int | None = None

    def shut(self, passes: int = 0) -> None:
        """Let `passes` more forward passes through."""
        with self._condition:
            self._passes = passes
            self._condition.notify_all()

    def open(self) -> None:
        with self._condition:
            self._passes = None
            self._condition.notify_all()

    def run(self, plan: StepPlan) -> StepOutcome:
        if any(isinstance(entry, RunBatch) for entry in plan.entries):
            with self._condition:
                self.held = self._passes == 0
                self._condition.wait_for(lambda: self._passes is None or self._passes > 0)
                self.held = False
                if self._passes is not None:
                    self._passes -= 1
        if self.fault is not None:
            raise self.fault
        for entry in plan.entries:
            if isinstance(entry, RunBatch):
                self.spans += [(row.start, row.stop) for row in entry.rows]
            elif isinstance(entry, ImportKV):
                self.imported += len(entry.slots)
        return super().run(plan)

    def computed(self, tokens: int) -> int:
        """How many tokens before number `tokens` of any sequence have been computed."""
        return sum(max(0, min(stop, tokens) - start) for start, stop in self.spans)


@dataclass
class Member:
    """One worker of a deployment."""

    name: str
    host: WorkerHost
    runner: GatedRunner
    built: BuiltEngine
    closed: bool = False

    @property
    def engine(self) -> Engine:
        return self.built.engine

    @property
    def source(self) -> KVSource:
        return self.host._prefill.source

    @property
    def idle(self) -> bool:
        """Nothing is left of any request, in the engine or around it."""
        load, host = self.engine.load(), self.host
        return (
            load.free_blocks + load.cached_blocks == self.built.limits.num_blocks
            and load.waiting == load.running == load.exported_blocks == 0
            and host._sessions.attempts == 0
            and self.source.active() == 0
            and not host._prefill._transfers
            and not host._prefill._attempts
            and not host._prefill._reads
            and not host._decode._fetches
            and not host._decode._writes
            and not host._decode._admissions
        )

    async def kill(self) -> None:
        """Break its connections first, as when its process dies."""
        self.closed = True
        if self.host._server is not None:
            await self.host._server.stop(grace=0)
        self.runner.open()
        await self.host.close()


def build(
    num_blocks: int, step_s: float, hit_tokens: int | None = None, **limits: float
) -> BuiltEngine:
    defaults: dict[str, float] = {
        "max_seqs": 4,
        "max_prefill_seqs": 2,
        "max_batch_tokens": MAX_MODEL_LEN + 4,
        "max_waiting": 64,
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB,
    }
    bounds = Limits(**defaults | limits)
    runner = GatedRunner(num_blocks, step_s)
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    cache = None if hit_tokens is None else PrefixCache(pool, root_hash(b"fake"), hit_tokens)
    engine = Engine(Scheduler(bounds, pool, cache), runner)
    described = ModelLimits(
        "fake", VOCAB, bounds.max_model_len, BLOCK_SIZE, num_blocks, bounds.max_seqs
    )
    arrays = (KVArray("tokens", "int32", 1, 1, 1),)
    return BuiltEngine(engine, runner, described, arrays, CHUNK_TOKENS)


def roles_of(topology: str) -> list[tuple[str, Role]]:
    if topology == "colocated":
        return [("worker-0", COLOCATED)]
    prefill, decode = map(int, topology.split(","))
    return [(f"prefill-{i}", Role.PREFILL) for i in range(prefill)] + [
        (f"decode-{i}", Role.DECODE) for i in range(decode)
    ]


class Deployment:
    """Workers, and the dispatcher that speaks to them over Unix sockets."""

    def __init__(
        self,
        members: dict[str, Member],
        pool: WorkerPool,
        dispatcher: Dispatcher,
        start: Callable[[str, Role], Awaitable[Member]],
    ) -> None:
        self.members = members
        self.pool = pool
        self.dispatcher = dispatcher
        self._start = start
        self._ids = itertools.count()

    async def revive(self, name: str) -> None:
        """Start a worker that was killed once more, and wait until the router has found it."""
        await eventually(lambda: not self.pool.all_open)  # its end may be news still
        self.members[name] = await self._start(name, self.members[name].host._roles)
        async with asyncio.timeout(5):
            await self.pool.wait_until_all_open()

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def stream(self, prompt: Sequence[int], **sampling: object) -> AsyncGenerator[TokenDelta, None]:
        """The dispatcher's generator for one request."""
        params = SamplingParams(**{"max_tokens": 8, **sampling})  # type: ignore[arg-type]
        return self.dispatcher.generate(prompt, params, request_id=f"request-{next(self._ids)}")

    def choices(
        self, prompt: Sequence[int], count: int, **sampling: object
    ) -> list[AsyncGenerator[TokenDelta, None]]:
        """The generators of a prompt's choices."""
        params = SamplingParams(**{"max_tokens": 8, **sampling})  # type: ignore[arg-type]
        siblings = Siblings(prompt, count)
        return [
            self.dispatcher.generate(
                prompt,
                params,
                request_id=f"request-{next(self._ids)}",
                choice=choice,
                siblings=siblings,
            )
            for choice in range(count)
        ]

    async def ask(self, prompt: Sequence[int], **sampling: object) -> list[int]:
        """All tokens of one request; checks that the stream is without gap and ends once."""
        tokens, finish = await collect(self.stream(prompt, **sampling))
        assert finish is not None
        return tokens

    async def until_idle(self) -> None:
        await eventually(lambda: self.idle)

    @property
    def idle(self) -> bool:
        workers = self.pool._workers.values()
        return (
            not self.dispatcher._flights
            and all(w.sequences == 0 and w.prefill_tokens == 0 for w in workers)
            and all(m.idle for m in self.members.values() if not m.closed)
        )


async def collect(
    stream: AsyncIterator[TokenDelta], into: list[int] | None = None
) -> tuple[list[int], FinishReason | None]:
    """The tokens of a stream (appended to `into` as they come) and why it ended."""
    tokens = [] if into is None else into
    finish = None
    async for delta in stream:
        assert finish is None
        assert delta.index == len(tokens)
        tokens += delta.tokens
        finish = delta.finish
    return tokens, finish


@contextlib.asynccontextmanager
async def deployment(
    topology: str,
    *,
    transports: tuple[str, ...] = ("shm", "grpc"),
    num_blocks: int = 64,
    step_s: float = 0.0,
    seed: int = 1,
    hit_tokens: int | None = None,
    only: dict[str, dict[str, float]] | None = None,
    **limits: float,
) -> AsyncIterator[Deployment]:
    """All its workers are ready. At the end every engine must be whole and every socket gone.

    With `hit_tokens` each has a prefix cache. `limits` are the schedulers'; `only[name]` replaces
    some of them for one worker.
    """
    folder = Path(tempfile.mkdtemp(prefix="hs-"))  # short, and of mode 0700
    members: dict[str, Member] = {}
    pool = None

    async def start(name: str, roles: Role) -> Member:
        address = parse_address(f"unix:{folder}/{name}.sock", None, transports, name)
        built = build(num_blocks, step_s, hit_tokens, **limits | (only or {}).get(name, {}))
        arrays = array_transfer(roles) if "jax" in transports else None
        host = WorkerHost(built, roles, address, transports, arrays)
        members[name] = Member(name, host, built.runner, built)
        await host.open()
        return members[name]

    try:
        for name, roles in roles_of(topology):
            await start(name, roles)
        pool = WorkerPool([f"unix:{folder}/{name}.sock" for name in members])
        dispatcher = Dispatcher(pool, seed)
        pool.open()
        async with asyncio.timeout(5):
            await pool.wait_until_all_open()
        yield Deployment(members, pool, dispatcher, start)
    finally:
        for member in members.values():
            member.runner.open()
        if pool is not None:
            await pool.close()
        for member in members.values():
            if not member.closed:
                await member.host.close()
        for member in members.values():
            member.engine.check_invariants()
        assert not [name for name in os.listdir(folder) if name.endswith(".kv")]
        shutil.rmtree(folder)
