"""The next step is dispatched before the last one's tokens are read back, and nothing shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.engine import Engine
from engine.events import Abort, Add, Admitted, Event, TokenDelta
from engine.fake import FakeRunner
from engine.pace import Pace
from engine.plan import LAST_SAMPLED, RunBatch, StepOutcome, StepPlan
from engine.types import COLOCATED, AttemptId, FinishReason, SequenceRequest
from tests.engine.helpers import (
    VOCAB,
    Ahead,
    OneByOne,
    deltas_of,
    expected,
    make_engine,
    output_of,
    request,
    run,
)

BLOCKS, BLOCK_SIZE = 16, 4


class WatchedRunner(FakeRunner):
    """Refuses a plan that names a block which an unfinished one names for another sequence."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, BLOCK_SIZE, VOCAB)
        self.plans: list[StepPlan] = []
        self.unfinished: list[StepPlan] = []

    def dispatch(self, plan: StepPlan) -> Callable[[], StepOutcome]:
        owners = {b: name for other in self.unfinished for name, b in blocks_of(other)}
        for name, block in blocks_of(plan):
            assert owners.get(block, name) == name, f"block {block} is in use"
        self.plans.append(plan)
        self.unfinished.append(plan)
        wait = super().dispatch(plan)

        def finish() -> StepOutcome:
            assert self.unfinished.pop(0) is plan, "plans are waited for in order"
            return wait()

        return finish

    def tokens_of(self, name: str) -> list[int]:
        """What the plans computed for one sequence, LAST_SAMPLED included."""
        return [
            token
            for plan in self.plans
            for batch in plan.entries
            if isinstance(batch, RunBatch)
            for row in batch.rows
            if row.id.attempt.request_id == name
            for token in row.tokens
        ]


def blocks_of(plan: StepPlan) -> list[tuple[str, int]]:
    batches = (entry for entry in plan.entries if isinstance(entry, RunBatch))
    return [
        (row.id.attempt.request_id, block)
        for batch in batches
        for row in batch.rows
        for block in row.blocks.tolist()
    ]


def watched(**limits: float) -> tuple[Engine, WatchedRunner]:
    runner = WatchedRunner()
    return make_engine(BLOCKS, BLOCK_SIZE, runner, **limits), runner


def stopping(name: str, prompt: tuple[int, ...], after: int) -> SequenceRequest:
    """A request that ends by a stop token, its output token number `after`."""
    stop = expected(prompt, after)[-1]
    assert stop not in expected(prompt, after - 1)
    return request(name, prompt, max_tokens=20, stop_token_ids=frozenset({stop}))


def test_decode_rows_name_tokens_that_have_not_been_read_back() -> None:
    engine, runner = watched()
    engine.submit(Add(request("r", (3, 1, 4), max_tokens=6)))
    assert output_of(run(engine), "r") == expected((3, 1, 4), 6)
    # The last token is known to be the last: no row computes what would follow it.
    assert runner.tokens_of("r") == [3, 1, 4] + [LAST_SAMPLED] * 5


def test_a_stop_token_costs_one_row_whose_result_is_dropped() -> None:
    engine, runner = watched()
    engine.submit(Add(stopping("r", (3, 1, 4), 4)))
    events = run(engine)
    assert output_of(events, "r") == expected((3, 1, 4), 4)
    assert deltas_of(events, "r")[-1].finish is FinishReason.STOP
    assert runner.tokens_of("r") == [3, 1, 4] + [LAST_SAMPLED] * 4
    assert engine.load().free_blocks == BLOCKS


def test_one_by_one_no_row_is_in_vain() -> None:
    runner = WatchedRunner()
    engine = make_engine(BLOCKS, BLOCK_SIZE, runner, OneByOne())
    engine.submit(Add(stopping("r", (3, 1, 4), 4)))
    whole = expected((3, 1, 4), 4)
    assert output_of(run(engine), "r") == whole
    assert tuple(runner.tokens_of("r")) == (3, 1, 4, *whole[:3])


def test_blocks_come_back_when_the_last_step_that_names_them_has_run() -> None:
    """Pools so small that the next sequence takes the blocks of the one that has ended."""
    engine, runner = watched(max_seqs=4, max_waiting=20, max_model_len=40)
    prompts = {f"r{i}": tuple((11 * i + j) % VOCAB for j in range(9 + i)) for i in range(8)}
    for index, (name, prompt) in enumerate(prompts.items()):
        engine.submit(Add(stopping(name, prompt, 2 + index % 3)))
    events = run(engine)
    for index, (name, prompt) in enumerate(prompts.items()):
        assert output_of(events, name) == expected(prompt, 2 + index % 3)
    assert engine.load().free_blocks == BLOCKS
    taken = [block for plan in runner.plans for _, block in blocks_of(plan)]
    assert max(map(taken.count, set(taken))) > 8, "blocks have been used again"


def test_an_abort_while_steps_are_under_way() -> None:
    engine, runner = watched()
    engine.submit(Add(request("gone", (1, 2, 3), max_tokens=20)))
    engine.submit(Add(request("stays", (4, 5), max_tokens=6)))
    events = [event for _ in range(3) for event in engine.step().events]
    assert len(deltas_of(events, "gone")) == 2
    engine.submit(Abort(AttemptId("gone", 0)))
    result = engine.step()  # commits a step that has a row of it
    assert not deltas_of(list(result.events), "gone")
    load = result.load
    assert load.free_blocks + load.running_blocks == BLOCKS
    assert runner.tokens_of("gone") == [1, 2, 3, LAST_SAMPLED, LAST_SAMPLED]
    events += [*result.events, *run(engine)]
    assert len(deltas_of(events, "gone")) == 2
    assert output_of(events, "stays") == expected((4, 5), 6)
    assert engine.load().free_blocks == BLOCKS


def test_one_who_comes_back_under_its_old_name_gets_no_old_token() -> None:
    engine, _ = watched()
    engine.submit(Add(request("r", (1, 2, 3), max_tokens=20)))
    for _ in range(3):
        engine.step()
    engine.submit(Abort(AttemptId("r", 0)))
    engine.submit(Add(request("r", (7, 8), max_tokens=5)))
    assert output_of(run(engine), "r") == expected((7, 8), 5)


@pytest.mark.parametrize("pace", [Ahead, OneByOne])
def test_a_prompt_in_chunks_beside_decoding(pace: type[Pace]) -> None:
    engine = make_engine(pace=pace(), max_batch_tokens=6)
    prompts = {"short": (5,), "long": tuple(range(20, 43)), "other": (9, 8, 7)}
    for name, prompt in prompts.items():
        engine.submit(Add(request(name, prompt, max_tokens=9)))
    events = run(engine)
    for name, prompt in prompts.items():
        assert output_of(events, name) == expected(prompt, 9)


def test_what_is_asked_while_a_step_runs_joins_the_next() -> None:
    class Waiting(Pace):
        """The next step is due when all has been asked."""

        asked = 0

        def wait_s(self) -> float | None:
            self.asked -= 1
            return 60.0 if self.asked > 0 else 0.0

    pace = Waiting()
    engine = make_engine(pace=pace)
    engine.submit(Add(request("a", (1, 2), max_tokens=9)))
    engine.step()
    pace.asked = 3
    engine.submit(Add(request("b", (3, 4), max_tokens=9)))
    engine.submit(Add(request("c", (5, 6), max_tokens=9)))
    events: tuple[Event, ...] = engine.step().events
    assert [e.id.attempt.request_id for e in events if isinstance(e, Admitted)] == ["b", "c"]
    assert sum(isinstance(e, TokenDelta) for e in events) == 1


# ---- the pace ----


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def plan_of(rows: int) -> StepPlan:
    """A decode step of `rows` rows, as a scheduler makes it."""
    engine = make_engine(pace=OneByOne(), max_seqs=8, max_prefill_seqs=8)
    for index in range(rows):
        engine.submit(Add(request(str(index), (index,), COLOCATED, max_tokens=3)))
    return engine._scheduler.schedule() if engine._wait_until_due() else StepPlan()


def test_a_step_is_due_halfway_through_the_last_of_its_size() -> None:
    clock = Clock()
    pace, plan = Pace(clock), plan_of(2)
    assert pace.wait_s() == 0.0
    pace.dispatched(plan)
    assert pace.began == 100.0
    assert pace.wait_s() is None, "the first of its size"
    clock.time += 0.050
    pace.ended()
    pace.dispatched(plan)
    assert pace.wait_s() == pytest.approx(0.025)
    clock.time += 0.048
    assert pace.wait_s() == pytest.approx(0.025 - 0.048), "overdue"
    pace.dispatched(plan)  # behind it: begins when it ends
    clock.time += 0.004
    pace.ended()
    assert pace.began == clock.time
    clock.time += 0.010
    assert pace.wait_s() == pytest.approx(0.025 - 0.010), "the shortest counts"


def test_late_dispatches_are_not_taken_for_longer_steps() -> None:
    clock, step_s, late_s = Clock(), 0.020, 0.006
    pace, plan = Pace(clock), plan_of(2)
    pace.dispatched(plan)
    clock.time += 0.100  # a hiccup is all that is known at first
    pace.ended()
    pace.dispatched(plan)
    for _ in range(40):
        began, wait_s = pace.began, pace.wait_s()
        assert began is not None
        assert wait_s is not None
        clock.time += max(wait_s, 0.0) + late_s
        pace.dispatched(plan)
        clock.time = max(clock.time, began + step_s)
        pace.ended()
    assert clock.time - began == pytest.approx(step_s)


def test_nothing_is_foreseen_of_a_step_of_another_size() -> None:
    clock = Clock()
    pace = Pace(clock)
    for plan in (plan_of(2), plan_of(3)):
        pace.dispatched(plan)
        assert pace.wait_s() is None
        clock.time += 0.050
        pace.ended()
    pace.dispatched(plan_of(2))
    assert pace.wait_s() is None, "the last one was another"
    clock.time += 0.020
    pace.ended()
    pace.dispatched(StepPlan())
    assert pace.wait_s() is None, "copies alone"
