"""The prefix cache against a model of it, and what sequences take from it and leave in it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from checkpoint.fake import write_fake_model
from engine import prefix_cache
from engine.block_hash import block_hashes, root_hash
from engine.blocks import BlockPool
from engine.build import build_engine
from engine.engine import Engine
from engine.events import (
    Abort,
    Add,
    Admitted,
    BeginDecode,
    CacheChanged,
    Computed,
    Event,
    KVWritten,
    WriteKV,
)
from engine.prefix_cache import Prefix, PrefixCache
from engine.types import COLOCATED, AttemptId, Role, TokenDelta
from settings.config import EngineConfig, ModelConfig
from settings.errors import ConfigError
from tests.engine.helpers import (
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

SIZE = 4
ROOT = root_hash(b"fake")


class CacheMachine(RuleBasedStateMachine):
    """The model: chains of tokens, each known with the time of its last use.

    Two tokens and blocks of two tokens make most prompts share something.
    """

    blocks = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.blocks, 2)
        self.cache = PrefixCache(self.pool, ROOT, 2)
        self.owners: list[tuple[list[int], Prefix, np.ndarray]] = []
        self.model: dict[tuple[int, ...], int] = {}  # tokens of whole blocks → last use
        self.clock = itertools.count()
        self.told: set[int] = set()

    def used(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[: 2 * n]) for n in range(1, len(tokens) // 2 + 1)]

    def evict(self, wanted: int) -> None:
        """The leaf that nobody uses and that was used the longest ago, until there is room."""
        free = self.pool.num_blocks - len({int(b) for _, _, t in self.owners for b in t})
        held = {chain for tokens, p, _ in self.owners for chain in self.used(tokens)[: p.shared]}
        idle = {chain: at for chain, at in self.model.items() if chain not in held}
        while free - len(idle) < wanted:
            leaves = {c: at for c, at in idle.items() if not any(o[:-2] == c for o in idle)}
            oldest = min(leaves.items(), key=lambda leaf: leaf[1])[0]
            del idle[oldest], self.model[oldest]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), promise=st.booleans())
    def begin(self, tokens: list[int], promise: bool) -> None:
        prefix = Prefix()
        self.cache.name(prefix, tokens)
        assert prefix.hashes == block_hashes(tokens, 2, ROOT)
        known = [chain for chain in self.used(tokens) if chain in self.model]
        found = self.cache.find(prefix, len(tokens) // 2)
        assert len(found) == len(known)
        more = self.pool.blocks_for(len(tokens)) - len(found)
        if more > self.pool.available - sum(map(self.pool.is_cached, found)):
            return
        self.cache.take(prefix, found)
        owner = (tokens, prefix, np.array(found, np.int32))
        self.owners.append(owner)
        self.evict(more)
        table = np.array([*found, *self.pool.reserve(more)], np.int32)
        self.owners[-1] = (tokens, prefix, table)
        if promise:
            self.cache.promise(prefix)

    @rule(index=st.integers(0, 100), count=st.integers(0, 4))
    def add(self, index: int, count: int) -> None:
        if not self.owners:
            return
        index %= len(self.owners)
        tokens, prefix, table = self.owners[index]
        count = min(count, len(tokens) // 2)
        table = self.cache.add(prefix, table, count)
        self.owners[index] = (tokens, prefix, table)
        for chain in self.used(tokens)[:count]:
            self.model.setdefault(chain, -1)

    @rule(index=st.integers(0, 100))
    def end(self, index: int) -> None:
        if not self.owners:
            return
        tokens, prefix, table = self.owners.pop(index % len(self.owners))
        self.cache.withdraw(prefix)
        self.pool.release(table.tolist())
        now = next(self.clock)
        for chain in self.used(tokens)[: prefix.shared]:
            self.model[chain] = now

    @invariant()
    def agrees(self) -> None:
        self.cache.check_invariants([(p, t.tolist()) for _, p, t in self.owners])
        self.pool.check_invariants([int(b) for _, _, t in self.owners for b in t], ())
        changed = self.cache.take_changes()
        if changed is not None:
            self.told -= set(changed.evicted)
            assert not self.told & set(changed.added)
            self.told |= set(changed.added)
        wanted = {block_hashes(chain, 2, ROOT)[-1] for chain in self.model}
        assert set(self.cache.hashes) == self.told == wanted


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_equal_hashes_of_other_tokens_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is named alike: what is found must be compared, and no second one is added."""
    monkeypatch.setattr(prefix_cache, "chain_hashes", lambda pieces, root: [7] * len(pieces))
    engine = cached_engine()
    first, second = tuple(range(1, 10)), tuple(range(11, 20))
    for name, prompt in (("a", first), ("b", second), ("c", first), ("d", second)):
        engine.submit(Add(request(name, prompt, max_tokens=3)))
        assert output_of(run(engine), name) == expected(prompt, 3)
    assert engine.load().prefix_hits == SIZE  # the one block that was added, by c


@pytest.mark.parametrize("hit_tokens", [0, 6, -4])
def test_hits_are_whole_blocks(hit_tokens: int) -> None:
    with pytest.raises(ValueError, match="no whole blocks of 4"):
        PrefixCache(BlockPool(4, 4), ROOT, hit_tokens)


# ---- in the engine ----


def cached_engine(num_blocks: int = 32, hit_tokens: int = SIZE, **limits: float) -> Engine:
    return make_engine(num_blocks, SIZE, hit_tokens=hit_tokens, **limits)


def serve(engine: Engine, name: str, prompt: tuple[int, ...], count: int = 3) -> int:
    """The cached tokens that are told of a request's prompt; its answer must be right."""
    engine.submit(Add(request(name, prompt, max_tokens=count)))
    events = run(engine)
    assert output_of(events, name) == expected(prompt, count)
    first, *others = deltas_of(events, name)
    assert not any(delta.cached_tokens for delta in others)
    return first.cached_tokens


PROMPT = tuple(range(1, 17))  # four blocks


def test_the_last_prompt_token_is_always_computed() -> None:
    engine = cached_engine()
    assert [serve(engine, name, PROMPT) for name in "ab"] == [0, 12]
    assert serve(engine, "c", PROMPT[:13]) == 12
    assert serve(engine, "d", PROMPT[:12]) == 8
    load = engine.load()
    assert (load.prefix_queries, load.prefix_hits) == (16 + 16 + 13 + 12, 12 + 12 + 8)
    assert load.cached_blocks == 4


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    engine = cached_engine()
    serve(engine, "a", PROMPT, 9)  # KV of 24 tokens: the last one's is never needed
    assert serve(engine, "b", (*PROMPT, *expected(PROMPT, 9), 5, 6)) == 24


def test_hits_come_in_multiples() -> None:
    engine = cached_engine(hit_tokens=3 * SIZE)
    serve(engine, "a", PROMPT, 12)  # six full blocks
    assert serve(engine, "b", (*PROMPT, *expected(PROMPT, 6), 5)) == 12
    assert serve(engine, "c", (*PROMPT, *expected(PROMPT, 12), 5)) == 24


def test_what_counts_is_at_most_the_prompt() -> None:
    """Output of an earlier attempt is found as well, but is no prompt token."""
    engine = cached_engine()
    serve(engine, "a", PROMPT, 12)
    earlier = expected(PROMPT, 10)
    engine.submit(Add(request("b", PROMPT[:15], output=(16, *earlier), max_tokens=13)))
    events = run(engine)
    (admitted,) = [e for e in events if isinstance(e, Admitted)]
    assert admitted.reused == 24
    (first, *_) = deltas_of(events, "b")
    assert first.index == 11
    assert first.cached_tokens == 12


def test_a_shared_prefix_that_is_being_computed_is_waited_for() -> None:
    engine = cached_engine(max_batch_tokens=8)
    for name, prompt in (("a", PROMPT), ("b", (*PROMPT[:9], 50)), ("c", (60, 61))):
        engine.submit(Add(request(name, prompt, max_tokens=2)))
    events = run(engine)
    order = [e.id.attempt.request_id for e in events if isinstance(e, Admitted)]
    assert order == ["a", "c", "b"]  # c shares nothing, and passes
    assert [deltas_of(events, name)[0].cached_tokens for name in "abc"] == [0, 8, 0]
    assert engine.load().prefix_hits == 8


def test_it_waits_no_longer_than_for_what_it_shares() -> None:
    engine = cached_engine(max_batch_tokens=8, max_model_len=60)
    engine.submit(Add(request("long", tuple(range(40)), max_tokens=2)))
    engine.submit(Add(request("b", (*range(4), 50), max_tokens=2)))
    events = run(engine)
    kinds = [
        (type(e), e.id.attempt.request_id) for e in events if isinstance(e, (Admitted, TokenDelta))
    ]
    assert kinds.index((Admitted, "b")) < kinds.index((TokenDelta, "long"))
    assert engine.load().prefix_hits == 4


@pytest.mark.parametrize("added_by", ["its owner", "another"])
def test_who_waits_does_not_take_the_place_of_whom_it_waits_for(added_by: str) -> None:
    """The long prompt never has its turn: at each step somebody more urgent asks.

    Another, who needs all logits and so waits for nobody, may be first to have the shared block.
    """
    engine = cached_engine(200, max_batch_tokens=8, max_model_len=200, interleave_prefills=True)
    long = request("long", tuple(range(90)), max_tokens=1)
    engine.submit(Add(dataclasses.replace(long, priority=5)))
    if added_by == "another":
        engine.submit(Add(request("scored", (*range(16), 3), max_tokens=1, prompt_logprobs=0)))
    engine.step()
    engine.submit(Add(request("short", (*range(16), 50), max_tokens=1)))
    for number in range(20):
        fresh = tuple(range(number, number + 20))
        engine.submit(Add(request(f"other {number}", (90, *fresh), max_tokens=1)))
        if deltas_of(list(engine.step().events), "short"):
            return
    raise AssertionError("it waits as the long one does")


def test_who_waits_computes_it_when_the_other_dies() -> None:
    engine = cached_engine(max_batch_tokens=8)
    engine.submit(Add(request("a", PROMPT, max_tokens=2)))
    engine.submit(Add(request("b", (*PROMPT, 50), max_tokens=2)))
    run_until(engine, Admitted)
    assert engine.load().waiting == 1
    engine.submit(Abort(AttemptId("a", 0)))
    events = run(engine)
    assert output_of(events, "b") == expected((*PROMPT, 50), 2)


def test_cached_blocks_are_room() -> None:
    engine = cached_engine(num_blocks=6)
    serve(engine, "a", PROMPT, 2)
    told: list[Event] = []
    engine.submit(Add(request("b", tuple(range(50, 70)), max_tokens=2)))
    told += run(engine)
    assert output_of(told, "b") == expected(tuple(range(50, 70)), 2)
    evicted = [name for e in told if isinstance(e, CacheChanged) for name in e.evicted]
    names = block_hashes(PROMPT, SIZE, ROOT)
    assert evicted == [names[3], names[2], names[1], names[0]][: len(evicted)]
    assert len(evicted) == 4


def test_a_prefill_for_another_worker_offers_what_it_has_found() -> None:
    engine = cached_engine()
    serve(engine, "a", PROMPT)
    engine.submit(Add(request("b", PROMPT, Role.PREFILL, b"t", max_tokens=4)))
    events = run(engine)
    admitted = next(i for i, e in enumerate(events) if isinstance(e, Admitted))
    assert events[admitted].reused == 12
    assert events[admitted + 1] == Computed(b"t", 12)
    assert [e.tokens for e in events if isinstance(e, Computed)] == [12, 16]
    assert engine.load().exported_blocks == 4


@pytest.mark.parametrize("shared", [0, 4, 12, 16])
def test_a_decode_worker_fetches_what_it_lacks(shared: int) -> None:
    prefill, decode = cached_engine(), cached_engine()
    serve(decode, "before", (*PROMPT[:shared], 90, 91))
    asked = request("r", PROMPT, Role.DECODE, b"t", max_tokens=6)
    decode.submit(Add(asked))
    (admitted,) = [e for e in run(decode) if isinstance(e, Admitted)]
    assert admitted.reused == shared // SIZE * SIZE
    if shared:
        decode.submit(WriteKV(9, asked.id, shared - 1, shared, kv_of((0,))))
        assert KVWritten(9, ok=False) in run(decode), "a shared block is written"
    decode.submit(Abort(asked.id.attempt))
    run(decode)

    def make(role: Role) -> object:
        return request("s", PROMPT, role, b"s", max_tokens=6)

    deltas = hand_over(prefill, decode, make, piece=SIZE, start=shared)  # type: ignore[arg-type]
    assert [t for d in deltas for t in d.tokens] == list(expected(PROMPT, 6))
    assert decode.load().prefix_queries == shared + 2  # an import is none


def test_what_was_imported_twice_is_kept_once() -> None:
    decode = cached_engine()
    asked = [request(name, PROMPT, Role.DECODE, name.encode(), max_tokens=20) for name in "ab"]
    for each in asked:
        decode.submit(Add(each))
    run(decode)
    assert decode.load().running_blocks == 2 * 5
    for each in asked:
        decode.submit(WriteKV(0, each.id, 0, len(PROMPT), kv_of(PROMPT)))
    run(decode)
    for each in asked:
        decode.submit(BeginDecode(each.id, expected(PROMPT, 1)[0]))
    decode.step()
    assert decode.load().running_blocks == 5 + 5 - 4
    events = run(decode)
    for name in "ab":
        tokens = [t for d in deltas_of(events, name) for t in d.tokens]
        assert tuple(tokens) == expected(PROMPT, 20)[1:]


def test_without_a_cache_nothing_is_kept() -> None:
    engine = make_engine(32, SIZE)
    assert [serve(engine, name, PROMPT) for name in "ab"] == [0, 0]
    load = engine.load()
    assert (load.free_blocks, load.cached_blocks) == (32, 0)
    assert (load.prefix_queries, load.prefix_hits) == (0, 0)


def built(tmp_path: Path, max_model_len: int | None = None, **config: Any) -> Engine:
    folder = write_fake_model(tmp_path / "fake")
    model = ModelConfig(str(folder), max_model_len=max_model_len)
    config = {"enable_prefix_cache_hbm": True, "block_size": 16} | config
    return build_engine(folder, model, EngineConfig(**config), COLOCATED).engine


@pytest.mark.parametrize(("padding", "found"), [(None, 64), (16, 96), (32, 96), (8, 96)])
def test_the_padding_of_prompts_is_the_step_of_hits(
    tmp_path: Path, padding: int | None, found: int
) -> None:
    """By default it is the platform's; one below a block's size is rounded up to it."""
    engine = built(tmp_path, prefill_len_padding=padding)
    for name in "ab":
        engine.submit(Add(request(name, tuple(range(100)), max_tokens=1)))
        (delta,) = deltas_of(run(engine), name)
    assert delta.cached_tokens == found


def test_paddings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prefill_len_padding=24 and --block_size=16 do not"):
        built(tmp_path, prefill_len_padding=24)


def test_hits_longer_than_any_prompt_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "hexserve.engine")
    built(tmp_path, max_model_len=8192, block_size=8192)
    assert "nothing will be found" in caplog.text


def test_16k_tokens_are_found_at_once() -> None:
    limits = {"max_model_len": 20_000, "max_batch_tokens": 20_000}
    engine = make_engine(2048, 16, hit_tokens=64, **limits)
    system = tuple(i * i % 97 for i in range(16_384))
    cold = make_engine(2048, 16, **limits)
    for name, more in (("a", (1, 2)), ("b", (3,)), ("c", ())):
        asked = request(name, (*system, *more), max_tokens=8)
        outputs = []
        for each in (engine, cold):
            each.submit(Add(asked))
            outputs.append(output_of(run(each), name))
        assert outputs[0] == outputs[1]
    assert engine.load().prefix_hits == 16_384 + 16_384 - 64
