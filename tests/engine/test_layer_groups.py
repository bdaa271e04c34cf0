"""Windowed layers hold what their window shows, however long a sequence is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.engine import Engine
from engine.events import Add, Event, KVRead, ReadKV, ReleaseExport
from engine.kv_memory import KVNeeds, PoolNeeds, choose_blocks
from engine.layer_groups import most_seen
from engine.layer_needs import kv_needs, reach_of
from engine.limits import Limits
from engine.models.families import traits_of
from engine.types import COLOCATED, Failure, FailureCode, Role
from settings.config import GIB, BatchSizes, EngineConfig
from settings.errors import ConfigError
from tests.engine.helpers import LIMITS, expected, make_engine, output_of, request
from tests.engine.test_kv_memory import Device
from tests.engine.windowed_fake import WindowedFakeRunner

REACH, BLOCK_SIZE, CHUNK = 8, 4, 5
LONG = 10 * REACH
PROMPT = tuple(i * i % 97 for i in range(LONG))
SEES_AT_ONCE = {
    "a token": most_seen(REACH, BLOCK_SIZE, 1, 2 * LONG),
    "a chunk": most_seen(REACH, BLOCK_SIZE, CHUNK + LIMITS["max_seqs"], 2 * LONG),
}


def windowed_engine(windowed: int, chunk: int = CHUNK, **limits: int) -> Engine:
    return make_engine(
        64,
        BLOCK_SIZE,
        WindowedFakeRunner(64, BLOCK_SIZE, REACH, windowed),
        reach=REACH,
        windowed_blocks=windowed,
        **({"max_model_len": 2 * LONG, "max_batch_tokens": chunk + LIMITS["max_seqs"]} | limits),
    )


def steps_of(engine: Engine) -> Iterator[tuple[tuple[Event, ...], int]]:
    """Events and windowed blocks in use, of each step; what is free is overwritten after it."""
    pool = engine._scheduler._groups[1].pool
    while engine._scheduler.has_work or not engine._commands.empty():
        events = engine.step().events
        yield events, pool.num_blocks - pool.free
        assert isinstance(engine._runner, WindowedFakeRunner)
        engine._runner.spoil(engine._scheduler)


def test_blocks_that_a_window_may_touch() -> None:
    # Of positions 8 … 15 of blocks of 4, two are seen where the window begins with a block.
    assert most_seen(8, 4, 1, 100) == 3
    assert most_seen(1, 4, 1, 100) == 1
    assert most_seen(8, 4, 9, 100) == 5
    assert most_seen(8, 4, 9, 12) == most_seen(None, 4, 9, 12) == 3


def test_a_long_sequence_takes_no_more_than_its_window() -> None:
    """A prompt of ten windows, and an answer of nearly as many; a chunk is there beside."""
    engine = windowed_engine(16)
    engine.submit(Add(request("r", PROMPT, max_tokens=LONG - 1)))
    events: list[Event] = []
    peaks = []
    for new, used in steps_of(engine):
        events += new
        peaks.append((used, bool(output_started(events))))
    assert output_of(events, "r") == expected(PROMPT, LONG - 1)
    assert max(used for used, _ in peaks) == SEES_AT_ONCE["a chunk"]
    decoding = [used for used, begun in peaks if begun][3:]  # the last chunk's come back first
    assert max(decoding) <= SEES_AT_ONCE["a token"] + 1
    assert engine._scheduler._groups[1].pool.free == 16


def output_started(events: list[Event]) -> bool:
    return any(type(event).__name__ == "TokenDelta" for event in events)


def test_a_whole_prompt_in_one_step_lets_go_after_it() -> None:
    engine = windowed_engine(25, chunk=LONG)
    engine.submit(Add(request("r", PROMPT, max_tokens=20)))
    used = [used for _, used in steps_of(engine)]
    assert max(used) == LONG // BLOCK_SIZE + 1
    assert max(used[5:]) <= SEES_AT_ONCE["a token"] + 1


def test_what_waits_to_be_fetched_is_the_last_window() -> None:
    engine = windowed_engine(16)
    engine.submit(Add(request("r", PROMPT, Role.PREFILL, b"t", max_tokens=9)))
    *_, (_, used) = steps_of(engine)
    assert used == 2  # positions 73 … 79
    seen = LONG - REACH + 1
    for number, (start, stop, windowed, found) in enumerate(
        [(seen, LONG, True, True), (0, 8, False, True), (seen - 2, LONG, True, False)]
    ):
        engine.submit(ReadKV(number, b"t", start, stop, windowed=windowed))
        events = [event for new, _ in steps_of(engine) for event in new]
        (read,) = [event for event in events if isinstance(event, KVRead)]
        assert (read.arrays is not None) == found
    engine.submit(ReleaseExport(b"t"))
    assert [used for _, used in steps_of(engine)][-1:] in ([], [0])
    assert engine._scheduler._groups[1].pool.free == 16


def test_too_few_windowed_blocks_for_any_step_are_named() -> None:
    needed = SEES_AT_ONCE["a chunk"]
    engine = windowed_engine(needed - 1)
    engine.submit(Add(request("r", PROMPT, max_tokens=9)))
    (failure,) = [e for new, _ in steps_of(engine) for e in new if isinstance(e, Failure)]
    assert failure.code is FailureCode.INVALID
    assert failure.message == (
        f"{needed} KV blocks of 4 tokens are needed, this worker has {needed - 1} for windowed "
        "layers"
    )


def test_windowed_blocks_alone_may_cost_the_youngest_its_place() -> None:
    engine = windowed_engine(2 * SEES_AT_ONCE["a token"] + 1, chunk=7)
    for name in "abc":
        engine.submit(Add(request(name, PROMPT[:2], max_tokens=30)))
    events = [event for new, _ in steps_of(engine) for event in new]
    lost = {e.attempt.request_id for e in events if isinstance(e, Failure)}
    assert lost == {"c"}
    for name in "ab":
        assert output_of(events, name) == expected(PROMPT[:2], 30)


# ---- how much memory ----

GEMMA3 = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6,
}  # fmt: skip
"""Gemma 3 1B: 22 of 26 layers see 512 tokens."""
LAYER_BYTES = 2 * 4 * 256 * 32
"""K and V of 32 tokens in one of its layers, in float32."""
SIZES = BatchSizes(1, 8, 64, 1, 8, max_decode_seqs=32)


def needs_of(length: int, roles: Role = COLOCATED, **config: bool) -> KVNeeds:
    traits = traits_of(GEMMA3)
    reach = reach_of(traits, EngineConfig(**config), length)  # type: ignore[arg-type]
    limits = Limits(
        max_seqs=32, max_prefill_seqs=1, max_batch_tokens=544, max_waiting=9,
        max_model_len=length, vocab_size=traits.vocab,
    )  # fmt: skip
    return kv_needs(traits, reach, 26 * LAYER_BYTES, 0, limits, SIZES, 32, roles)


def test_far_longer_contexts_fit_where_most_layers_have_windows() -> None:
    device, config = Device(limit=2 * GIB, used=0), EngineConfig(hbm_utilization_factor=1.0)
    blocks, windowed = choose_blocks(device, needs_of(131_072), config)
    # 32 sequences of 17 + 1 blocks, and a chunk of 544 tokens beside a window.
    assert windowed == 32 * 18 + 34
    assert blocks == (2 * GIB - windowed * 22 * LAYER_BYTES) // (4 * LAYER_BYTES) == 4837
    every, none = choose_blocks(device, needs_of(32_768, enable_prefix_cache_hbm=True), config)
    assert (every, none) == (2 * GIB // (26 * LAYER_BYTES), 0) == (1260, 0)
    with pytest.raises(ConfigError, match="needs 4096 KV blocks, there are 1260"):
        choose_blocks(device, needs_of(131_072, enable_prefix_cache_hbm=True), config)


def test_a_sequence_has_room_before_windows_of_many_have() -> None:
    needs = needs_of(32768)
    assert needs.windowed is not None
    least = 1024 * 4 * LAYER_BYTES + needs.windowed.sequence_blocks * 22 * LAYER_BYTES
    assert needs.split(least) == (1024, needs.windowed.sequence_blocks)
    assert needs.split(least - 1)[0] == 1023
    device = Device(limit=least - 1, used=0)
    with pytest.raises(ConfigError, match=r"needs 1024 KV blocks, there are 1023: 0\.25 MiB"):
        choose_blocks(device, needs, EngineConfig(hbm_utilization_factor=1.0))


def test_windowed_blocks_are_never_more_than_the_others() -> None:
    needs = KVNeeds(PoolNeeds(10, 4), 0, 128, PoolNeeds(30, 2, enough=50))
    assert needs.split(400) == (10, 10)
    assert needs.split(3500) == (200, 50)
    assert choose_blocks(Device(), needs, EngineConfig(num_blocks=9)) == (9, 9)
    assert choose_blocks(Device(), needs, EngineConfig(num_blocks=99)) == (99, 50)


def test_where_all_layers_have_windows_there_is_one_pool() -> None:
    needs = KVNeeds(PoolNeeds(10, 4, enough=50), 0, 128)
    assert (needs.split(400), needs.split(4000)) == ((40, 0), (50, 0))


@pytest.mark.parametrize(
    ("length", "config"), [(512, {}), (32768, {"enable_prefix_cache_hbm": True})]
)
def test_all_is_kept_where_it_may_be_wanted(length: int, config: dict[str, bool]) -> None:
    """For prefixes that are found; and where no window ends before a sequence does."""
    needs = needs_of(length, **config)
    assert needs.windowed is None
    assert needs.pool == PoolNeeds(26 * LAYER_BYTES, length // 32)


def test_a_decode_worker_computes_no_chunks() -> None:
    needs, prefill = needs_of(32768, Role.DECODE), needs_of(32768, Role.PREFILL)
    assert needs.windowed is not None and prefill.windowed is not None  # noqa: PT018
    assert needs.windowed.sequence_blocks == 17
    assert prefill.windowed.sequence_blocks == 34
