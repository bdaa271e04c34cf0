"""Scheduler, blocks and engine loop with the fake model, on plain Python."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from engine import engine as engine_module
from engine.engine import COMMAND_TOKENS
from engine.events import (
    Abort,
    Add,
    BeginDecode,
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
from engine.fake import FakeRunner
from engine.plan import StepOutcome, StepPlan
from engine.types import (
    AttemptId,
    Failure,
    FailureCode,
    FinishReason,
    Role,
    SequenceId,
    TokenDelta,
)
from tests.engine.helpers import (
    VOCAB,
    OneByOne,
    deltas_of,
    expected,
    hand_over,
    kv_of,
    make_engine,
    output_of,
    request,
    run,
    run_until,
)


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
    engine = make_engine(num_blocks=4, max_seqs=1, max_waiting=1)
    engine.submit(Add(request("long", tuple(range(40)))))
    engine.submit(Add(request("big", tuple(range(10)), max_tokens=20)))
    engine.submit(Add(request("vocabulary", (VOCAB,))))
    for name in ("first", "second", "third"):  # one runs, one waits
        engine.submit(Add(request(name, (1,), max_tokens=4)))
    events = run(engine)
    failures = {e.attempt.request_id: e for e in events if isinstance(e, Failure)}
    assert set(failures) == {"long", "big", "vocabulary"}
    assert {f.code for f in failures.values()} == {FailureCode.INVALID}
    assert "40 tokens" in failures["long"].message
    assert [e.attempt.request_id for e in events if isinstance(e, Rejected)] == ["third"]
    for name in ("first", "second"):
        assert output_of(events, name) == expected((1,), 4)


def test_handoff_between_two_engines() -> None:
    """Prefill here, decode there, block sizes differ; KV moves in pieces of three tokens."""
    prefill, decode = make_engine(block_size=4), make_engine(block_size=8)
    prompt = tuple(range(3, 14))
    deltas = hand_over(
        prefill, decode, lambda roles: request("r", prompt, roles, b"t", max_tokens=6), piece=3
    )
    assert [d.index for d in deltas] == list(range(6))
    assert tuple(t for d in deltas for t in d.tokens) == expected(prompt, 6)
    prefill.submit(ReleaseExport(b"t"))  # once more
    run(prefill)
    assert prefill.load().free_blocks == decode.load().free_blocks == 16


def test_an_export_keeps_blocks_but_no_slot() -> None:
    engine = make_engine(block_size=4)
    engine.submit(Add(request("r", tuple(range(11)), Role.PREFILL, b"t", max_tokens=6)))
    run(engine)
    assert engine.load().exported_blocks == 3
    assert engine.load().running == 0


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
    arrays = kv_of((1, 2, 3))
    engine.submit(WriteKV(1, SequenceId(attempt["importing"], 0), 0, 3, arrays))
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
    arrays = kv_of((1, 2, 3))
    for command in (
        Abort(gone.attempt),
        ReleaseExport(b"?"),
        BeginDecode(gone, 1),
        ReadKV(1, b"?", 0, 3),
        WriteKV(2, gone, 0, 3, arrays),
    ):
        engine.submit(command)
    assert run(engine) == [KVRead(1, None), KVWritten(2, ok=False)]


def test_a_first_token_that_leaves_nothing_to_decode_fails() -> None:
    """Decoding on would need KV outside the blocks."""
    engine = make_engine()
    for name, token, stops in (("stop", 5, {5}), ("vocabulary", VOCAB, set()), ("low", -1, set())):
        asked = request(
            name, (1, 2, 3, 4), Role.DECODE, b"t", max_tokens=9, stop_token_ids=frozenset(stops)
        )
        engine.submit(Add(asked))
        run(engine)
        engine.submit(BeginDecode(asked.id, token))
        (failure,) = run(engine)
        assert isinstance(failure, Failure)
        assert (failure.attempt, failure.code) == (asked.id.attempt, FailureCode.TRANSFER)
        assert engine.load().free_blocks == 16


def test_a_long_prompt_is_computed_in_chunks_whose_kv_can_be_read_at_once() -> None:
    engine = make_engine(max_batch_tokens=10, pace=OneByOne())
    prompt = tuple(range(1, 26))
    engine.submit(Add(request("a", prompt, Role.PREFILL, b"t")))
    for computed in (10, 20):
        events = run_until(engine, Computed)
        assert [e.tokens for e in events if isinstance(e, Computed)] == [computed]
        assert not [e for e in events if isinstance(e, TokenDelta)]
        engine.submit(ReadKV(computed, b"t", computed - 10, computed))
        (read,) = run_until(engine, KVRead)
        assert isinstance(read, KVRead)
        assert read.arrays is not None
        assert read.arrays[0].ravel().tolist() == list(prompt[computed - 10 : computed])
    events = run_until(engine, Prefilled)
    assert [e.first.tokens for e in events if isinstance(e, Prefilled)] == [expected(prompt, 1)]


def test_a_step_that_has_no_room_for_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens=4 .*max_seqs=4"):
        make_engine(max_batch_tokens=4)


def test_commands_from_many_threads_reach_a_waiting_engine() -> None:
    engine = make_engine(num_blocks=64, max_waiting=100)
    stopping = threading.Event()
    events: list[Event] = []

    def serve() -> None:
        while not stopping.is_set():
            engine.wait_for_work()
            events.extend(engine.step().events)

    def submit(thread: int) -> None:
        for number in range(10):
            engine.submit(Add(request(f"{thread}.{number}", (thread, number), max_tokens=5)))
            time.sleep(0.001)

    server = threading.Thread(target=serve, daemon=True)
    clients = [threading.Thread(target=submit, args=(n,)) for n in range(4)]
    for thread in (server, *clients):
        thread.start()
    deadline = time.monotonic() + 30
    while sum(isinstance(e, TokenDelta) and e.finish is not None for e in list(events)) < 40:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    stopping.set()
    engine.wake()
    server.join(10)
    assert not server.is_alive()
    for thread, number in itertools.product(range(4), range(10)):
        assert output_of(events, f"{thread}.{number}") == expected((thread, number), 5)


def test_the_load_tells_the_age_of_the_running_step_alone() -> None:
    entered, leave = threading.Event(), threading.Event()

    class SlowRunner(FakeRunner):
        def run(self, plan: StepPlan) -> StepOutcome:
            entered.set()
            assert leave.wait(10)
            return super().run(plan)

    engine = make_engine(runner=SlowRunner(16, 4, VOCAB))
    assert engine.load().step_age_s == 0
    engine.submit(Add(request("r", (1, 2, 3), max_tokens=1)))
    engine.step()
    thread = threading.Thread(target=engine.step)
    thread.start()
    assert entered.wait(10)
    time.sleep(0.02)
    assert engine.load().step_age_s >= 0.02
    leave.set()
    thread.join(10)
    assert engine.load().step_age_s == 0


def test_commands_that_come_at_once_do_not_hold_a_step_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "TOKENS_PER_STEP", 2 * (COMMAND_TOKENS + 3))
    engine = make_engine()
    names = "abcde"
    for name in names:
        engine.submit(Add(request(name, (1, 2, 3), max_tokens=2)))
    engine.submit(Abort(AttemptId("d", 0)))
    assert len(engine.step().events) == 2, "two are admitted; the others come later, in order"
    assert engine._commands.qsize() == 4
    events = run(engine)
    for name in "abce":
        assert output_of(events, name) == expected((1, 2, 3), 2)
    assert not deltas_of(events, "d")
