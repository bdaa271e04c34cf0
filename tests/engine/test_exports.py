"""How much of its pool a prefill worker lets readers keep waiting."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.events import Abort, Add, Admitted, ReleaseExport
from engine.types import AttemptId, Role
from tests.engine.helpers import make_engine, output_of, request, run

BLOCKS, BLOCK_SIZE = 16, 4


def engine_of(fraction: float) -> Engine:
    return make_engine(BLOCKS, BLOCK_SIZE, max_exported_fraction=fraction)


def prefill(engine: Engine, name: str, tokens: int) -> None:
    prompt = tuple(range(1, tokens + 1))
    asked = request(name, prompt, Role.PREFILL, name.encode(), max_tokens=6)
    engine.submit(Add(asked))


def admitted(engine: Engine) -> list[str]:
    return [e.id.attempt.request_id for e in run(engine) if isinstance(e, Admitted)]


def test_no_more_prefills_are_begun_than_may_wait_to_be_fetched() -> None:
    engine = engine_of(0.5)  # 8 blocks
    for name in "abcd":
        prefill(engine, name, 3 * BLOCK_SIZE)
    assert admitted(engine) == ["a", "b", "c"]
    load = engine.load()
    assert load.export_limited
    assert (load.exported_blocks, load.free_blocks, load.waiting) == (9, 7, 1)
    engine.submit(ReleaseExport(b"a"))
    assert admitted(engine) == ["d"]
    engine.submit(Abort(AttemptId("b", 0)))
    prefill(engine, "e", 1)
    assert admitted(engine) == ["e"]
    assert not engine.load().waiting


def test_a_large_prompt_does_not_wait_for_every_reader() -> None:
    engine = engine_of(0.5)
    prefill(engine, "small", 1)
    assert admitted(engine) == ["small"]
    prefill(engine, "large", 9 * BLOCK_SIZE)
    assert admitted(engine) == ["large"]
    assert engine.load().export_limited


def test_the_limit_may_be_reached_and_is_told_then() -> None:
    engine = engine_of(0.5)
    prefill(engine, "a", 4 * BLOCK_SIZE)
    assert admitted(engine) == ["a"]
    assert not engine.load().export_limited
    prefill(engine, "b", 4 * BLOCK_SIZE)
    assert admitted(engine) == ["b"]
    assert engine.load().export_limited, "the next one would wait"
    for name in (b"a", b"b"):
        engine.submit(ReleaseExport(name))
    run(engine)
    assert not engine.load().export_limited


@pytest.mark.parametrize("fraction", [0.01, 0.1])
def test_one_prompt_alone_may_exceed_the_limit(fraction: float) -> None:
    engine = engine_of(fraction)
    for name in "ab":
        prefill(engine, name, 9 * BLOCK_SIZE)
    assert admitted(engine) == ["a"]
    engine.submit(ReleaseExport(b"a"))
    assert admitted(engine) == ["b"]


def test_what_decodes_here_waits_for_no_reader() -> None:
    engine = engine_of(0.01)
    prefill(engine, "a", 4)
    assert admitted(engine) == ["a"]
    engine.submit(Add(request("here", (1, 2, 3), max_tokens=2)))
    assert len(output_of(run(engine), "here")) == 2


def test_a_block_that_is_lost_is_missing_in_the_load() -> None:
    engine = engine_of(1.0)
    prefill(engine, "a", 4 * BLOCK_SIZE)
    run(engine)

    def accounted() -> int:
        load = engine._scheduler.load()
        return load.free_blocks + load.running_blocks + load.exported_blocks

    assert accounted() == BLOCKS
    exported = engine._scheduler._exports.get(b"a")
    exported.blocks = exported.blocks[:-1]
    assert accounted() == BLOCKS - 1
