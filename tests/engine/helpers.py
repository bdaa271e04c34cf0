"""Engines with the fake model, requests, and the steps that several tests share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.block_hash import root_hash
from engine.blocks import BlockPool
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
from engine.fake import FakeRunner, next_token
from engine.limits import Limits
from engine.pace import Pace
from engine.plan import StepPlan
from engine.prefix_cache import PrefixCache
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.types import (
    COLOCATED,
    AttemptId,
    FinishReason,
    Role,
    SamplingParams,
    SequenceId,
    SequenceRequest,
    TokenDelta,
)

VOCAB = 97
LIMITS = {
    "max_seqs": 4,
    "max_prefill_seqs": 2,
    "max_batch_tokens": 64,
    "max_waiting": 8,
    "max_model_len": 40,
    "vocab_size": VOCAB,
}


class Ahead(Pace):
    """Every step is dispatched before the last one's tokens are read back."""

    def wait_s(self) -> float | None:
        return 0.0


class OneByOne(Pace):
    """No step is dispatched before the last one has been committed."""

    def wait_s(self) -> float | None:
        return 0.0 if self.began is None else None


class CheckedScheduler(Scheduler):
    """A scheduler that recounts itself in the middle of a step too."""

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        self.check_invariants()
        return plan


class CheckedEngine(Engine):
    """An engine that recounts everything after each command and each step."""

    def _execute(self, command: object) -> None:
        super()._execute(command)  # type: ignore[arg-type]
        self.check_invariants()


def make_engine(
    num_blocks: int = 16,
    block_size: int = 4,
    runner: Runner | None = None,
    pace: Pace | None = None,
    hit_tokens: int | None = None,
    reach: int | None = None,
    windowed_blocks: int | None = None,
    **limits: float,
) -> Engine:
    """An engine of the fake model, unless there is a `runner`; ahead, unless there is a `pace`.

    With a prefix cache if it is said how long a hit is. `reach`, `windowed_blocks`: of windowed
    layers, which the `runner` must know of.
    """
    pool = BlockPool(num_blocks, block_size)
    cache = None if hit_tokens is None else PrefixCache(pool, root_hash(b"fake"), hit_tokens)
    windowed = None if windowed_blocks is None else BlockPool(windowed_blocks, block_size)
    scheduler = CheckedScheduler(Limits(**{**LIMITS, **limits}), pool, cache, reach, windowed)
    runner = runner or FakeRunner(num_blocks, block_size, VOCAB)
    return CheckedEngine(scheduler, runner, pace or Ahead())


def request(
    name: str,
    prompt: tuple[int, ...],
    roles: Role = COLOCATED,
    transfer_id: bytes = b"",
    output: tuple[int, ...] = (),
    choice: int = 0,
    group: bytes = b"",
    **sampling: object,
) -> SequenceRequest:
    return SequenceRequest(
        SequenceId(AttemptId(name, 0), choice),
        roles,
        prompt,
        SamplingParams(**sampling),  # type: ignore[arg-type]
        output,
        transfer_id,
        group=group,
    )


def expected(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The fake model's next `count` tokens, by hand."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tuple(tokens[len(prompt) :])


def answer(
    request: SequenceRequest, max_model_len: int = LIMITS["max_model_len"]
) -> tuple[tuple[int, ...], FinishReason]:
    """What the fake model must answer to `request`, earlier output included, and why it ends."""
    tokens = list(request.known_tokens)
    while True:
        tokens.append(next_token(tokens, VOCAB))
        output = tuple(tokens[len(request.prompt) :])
        if output[-1] in request.sampling.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == request.sampling.max_tokens or len(tokens) == max_model_len:
            return output, FinishReason.LENGTH


def kv_of(tokens: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """The fake model's KV of `tokens`, as a payload."""
    return (np.array(tokens, np.int32).reshape(1, -1, 1, 1),)


def run(engine: Engine, steps: int = 200) -> list[Event]:
    """Step until there is nothing to do."""
    events: list[Event] = []
    for _ in range(steps):
        events += engine.step().events
        engine.check_invariants()
        if not engine._scheduler.has_work and engine._commands.empty():
            return events
    raise AssertionError(f"still busy after {steps} steps")


def run_until(engine: Engine, kind: type[Event]) -> list[Event]:
    """Step until an event of `kind` has come."""
    events: list[Event] = []
    for _ in range(200):
        events += engine.step().events
        engine.check_invariants()
        if any(isinstance(event, kind) for event in events):
            return events
    raise AssertionError(f"no {kind.__name__}")


def deltas_of(events: list[Event], name: str, choice: int = 0) -> list[TokenDelta]:
    wanted = SequenceId(AttemptId(name, 0), choice)
    return [e for e in events if isinstance(e, TokenDelta) and e.id == wanted]


def untimed(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """Without what they took, which is never the same."""
    return [delta._replace(prefill_s=0.0) for delta in deltas]


def output_of(events: list[Event], name: str) -> tuple[int, ...]:
    """The tokens of a finished sequence, whose indices must be without a gap."""
    deltas = deltas_of(events, name)
    tokens: tuple[int, ...] = ()
    for delta in deltas:
        assert delta.index == len(tokens)
        tokens += delta.tokens
    assert [d.finish for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish is not None
    return tokens


def hand_over(
    prefill: Engine,
    decode: Engine,
    make_request: Callable[[Role], SequenceRequest],
    piece: int,
    on_device: bool = False,
    start: int = 0,
) -> list[TokenDelta]:
    """Serve one request by prefill here and decode there; KV moves `piece` tokens at a time.

    Both may be one engine if the two requests have different names. `on_device`: the KV does
    not leave the devices. Those before token `start` are there already.
    """
    source, target = make_request(Role.PREFILL), make_request(Role.DECODE)
    transfer, count = source.transfer_id, len(source.known_tokens)
    prefill.submit(Add(source))
    (first,) = [e.first for e in run(prefill) if isinstance(e, Prefilled)]
    decode.submit(Add(target))
    run(decode)
    for at in range(start, count, piece):
        stop = min(at + piece, count)
        prefill.submit(ReadKV(at, transfer, at, stop, on_device))
        (read,) = [e for e in run(prefill) if isinstance(e, KVRead)]
        assert read.arrays is not None
        decode.submit(WriteKV(at, target.id, at, stop, read.arrays))
        assert KVWritten(at, ok=True) in run(decode)
    prefill.submit(ReleaseExport(transfer))
    run(prefill)
    decode.submit(BeginDecode(target.id, first.tokens[0]))
    return [first, *(e for e in run(decode) if isinstance(e, TokenDelta))]
