"""Scheduler, blocks and engine loop with the fake model, on plain Python."""

from __future__ import annotations

from engine.blocks import BlockPool
from engine.engine import Engine
from engine.events import (
    Abort,
    Add,
    Admitted,
    BeginDecode,
    Event,
    KVRead,
    KVWritten,
    Prefilled,
    ReadKV,
    Rejected,
    ReleaseExport,
    WriteKV,
)
from engine.fake import FakeRunner, next_token
from engine.scheduler import Limits, Scheduler
from engine.types import (
    COLOCATED,
    AttemptId,
    Failure,
    FailureCode,
    FinishReason,
    Role,
    SamplingParams,
    SequenceId,
    SequenceRequest,
    TokenDelta,
)

VOCAB = 97


def make_engine(num_blocks: int = 16, block_size: int = 4, **limits: int) -> Engine:
    settings = {
        "max_seqs": 4,
        "max_prefill_seqs": 2,
        "max_batch_tokens": 64,
        "max_waiting": 8,
        "max_model_len": 40,
        "vocab_size": VOCAB,
    } | limits
    scheduler = Scheduler(Limits(**settings), BlockPool(num_blocks, block_size))
    return Engine(scheduler, FakeRunner(num_blocks, block_size, VOCAB))


def request(
    name: str,
    prompt: tuple[int, ...],
    roles: Role = COLOCATED,
    transfer_id: bytes = b"",
    output: tuple[int, ...] = (),
    **sampling: object,
) -> SequenceRequest:
    return SequenceRequest(
        SequenceId(AttemptId(name, 0), 0),
        roles,
        prompt,
        SamplingParams(**sampling),  # type: ignore[arg-type]
        output,
        transfer_id,
    )


def expected(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tuple(tokens[len(prompt) :])


def run(engine: Engine, steps: int = 100) -> list[Event]:
    events: list[Event] = []
    for _ in range(steps):
        events += engine.step().events
        engine.check_invariants()
        if not engine._scheduler.has_work and engine._commands.empty():
            break
    return events


def output_of(events: list[Event], name: str) -> tuple[int, ...]:
    deltas = [e for e in events if isinstance(e, TokenDelta) and e.id.attempt.request_id == name]
    tokens: tuple[int, ...] = ()
    for delta in deltas:
        assert delta.index == len(tokens)
        tokens += delta.tokens
    assert [d.finish for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish is not None
    return tokens


def test_answers_are_right_alone_and_together() -> None:
    engine = make_engine()
    prompts = {f"r{i}": tuple((7 * i + j) % VOCAB for j in range(1 + 3 * i)) for i in range(6)}
    for name, prompt in prompts.items():
        engine.submit(Add(request(name, prompt, max_tokens=9)))
    events = run(engine)
    for name, prompt in prompts.items():
        assert output_of(events, name) == expected(prompt, 9)
    assert engine.load().free_blocks == 16


def test_stop_token_and_lengths_end_a_sequence() -> None:
    engine = make_engine()
    tokens = expected((1, 2, 3), 5)
    engine.submit(Add(request("one", (1, 2, 3), max_tokens=1)))
    engine.submit(
        Add(request("stop", (1, 2, 3), max_tokens=30, stop_token_ids=frozenset({tokens[3]})))
    )
    engine.submit(Add(request("full", tuple(range(39)), max_tokens=99)))
    events = run(engine)
    assert output_of(events, "one") == tokens[:1]
    assert output_of(events, "stop") == tokens[: tokens.index(tokens[3]) + 1]
    assert output_of(events, "full") == expected(tuple(range(39)), 1)
    finishes = {
        e.id.attempt.request_id: e.finish
        for e in events
        if isinstance(e, TokenDelta) and e.finish is not None
    }
    assert finishes == {
        "one": FinishReason.LENGTH,
        "stop": FinishReason.STOP,
        "full": FinishReason.LENGTH,
    }


def test_resumed_output_continues_as_if_undisturbed() -> None:
    engine = make_engine()
    whole = expected((5, 6), 8)
    engine.submit(Add(request("r", (5, 6), output=whole[:3], max_tokens=8)))
    deltas = [e for e in run(engine) if isinstance(e, TokenDelta)]
    assert deltas[0].index == 3
    assert tuple(t for d in deltas for t in d.tokens) == whole[3:]


def test_what_can_never_fit_fails_at_once_and_a_full_queue_rejects() -> None:
    engine = make_engine(num_blocks=4, max_waiting=1)
    engine.submit(Add(request("long", tuple(range(40)))))
    engine.submit(Add(request("big", tuple(range(10)), max_tokens=20)))
    engine.submit(Add(request("vocabulary", (VOCAB,))))
    engine.submit(Add(request("first", (1,), max_tokens=4)))
    engine.submit(Add(request("second", (1,), max_tokens=4)))
    events = run(engine)
    failures = {e.attempt.request_id: e for e in events if isinstance(e, Failure)}
    assert set(failures) == {"long", "big", "vocabulary"}
    assert {f.code for f in failures.values()} == {FailureCode.INVALID}
    assert "40 tokens" in failures["long"].message
    assert [e.attempt.request_id for e in events if isinstance(e, Rejected)] == ["second"]
    assert output_of(events, "first") == expected((1,), 4)


def test_handoff_between_two_engines() -> None:
    """Prefill here, decode there, block sizes differ; KV moves in pieces of three tokens."""
    prefill, decode = make_engine(block_size=4), make_engine(block_size=8)
    prompt = tuple(range(3, 14))
    prefill.submit(Add(request("r", prompt, Role.PREFILL, b"t", max_tokens=6)))
    events = run(prefill)
    (first,) = [e.first for e in events if isinstance(e, Prefilled)]
    assert prefill.load().exported_blocks == 3
    assert prefill.load().running == 0

    decode.submit(Add(request("r", prompt, Role.DECODE, b"t", max_tokens=6)))
    assert [e.tokens for e in run(decode) if isinstance(e, Admitted)] == [len(prompt)]
    sequence = SequenceId(AttemptId("r", 0), 0)
    for start in range(0, len(prompt), 3):
        stop = min(start + 3, len(prompt))
        prefill.submit(ReadKV(start, b"t", start, stop))
        (read,) = [e for e in run(prefill) if isinstance(e, KVRead)]
        assert read.arrays is not None
        decode.submit(WriteKV(start, sequence, start, read.arrays))
        assert KVWritten(start, ok=True) in run(decode)
    prefill.submit(ReleaseExport(b"t"))
    prefill.submit(ReleaseExport(b"t"))
    run(prefill)
    assert prefill.load().free_blocks == 16

    decode.submit(BeginDecode(sequence, first.tokens[0]))
    deltas = [e for e in run(decode) if isinstance(e, TokenDelta)]
    assert deltas[0].index == 1
    assert first.tokens + tuple(t for d in deltas for t in d.tokens) == expected(prompt, 6)
    assert decode.load().free_blocks == 16


def test_first_token_that_ends_leaves_nothing_exported() -> None:
    engine = make_engine()
    engine.submit(Add(request("r", (1, 2, 3), Role.PREFILL, b"t", max_tokens=1)))
    (prefilled,) = [e for e in run(engine) if isinstance(e, Prefilled)]
    assert prefilled.first.finish is FinishReason.LENGTH
    assert engine.load().free_blocks == 16


def test_abort_in_every_state_gives_everything_back() -> None:
    engine = make_engine(num_blocks=8, max_seqs=2)
    attempt = {n: AttemptId(n, 0) for n in ("decoding", "exported", "importing", "waiting")}
    engine.submit(Add(request("exported", (1, 2, 3), Role.PREFILL, b"t", max_tokens=9)))
    run(engine)
    engine.submit(ReadKV(1, b"t", 0, 3))
    engine.submit(Add(request("decoding", (1, 2, 3), max_tokens=9)))
    engine.submit(Add(request("importing", (1, 2, 3), Role.DECODE, b"u", max_tokens=9)))
    engine.submit(Add(request("waiting", (1, 2, 3), max_tokens=9)))
    engine.step()
    arrays = (FakeRunner(1, 4, VOCAB)._pool[:3].reshape(1, -1, 1, 1),)
    engine.submit(WriteKV(1, SequenceId(attempt["importing"], 0), 0, arrays))
    engine.submit(ReadKV(2, b"t", 0, 3))
    for each in attempt.values():
        engine.submit(Abort(each))
        engine.submit(Abort(each))
    events = run(engine)
    assert KVRead(2, None) in events
    assert KVWritten(1, ok=False) in events
    assert engine.load().free_blocks == 8
    assert engine.load().running == engine.load().waiting == 0


def test_late_commands_are_ignored_or_answered() -> None:
    engine = make_engine()
    gone = SequenceId(AttemptId("gone", 0), 0)
    arrays = (FakeRunner(1, 4, VOCAB)._pool[:3].reshape(1, -1, 1, 1),)
    for command in (
        Abort(gone.attempt),
        ReleaseExport(b"?"),
        BeginDecode(gone, 1),
        ReadKV(1, b"?", 0, 3),
        WriteKV(2, gone, 0, arrays),
    ):
        engine.submit(command)
    assert run(engine) == [KVRead(1, None), KVWritten(2, ok=False)]
