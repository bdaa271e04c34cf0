"""KV that moves between engines without leaving the devices, whatever meshes they have."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from engine.build import _devices
from engine.compiles import CompileCounter
from engine.jax_runner import JaxRunner
from engine.plan import ExportKV, ImportKV, StepPlan
from engine.types import KVArrays, Role
from settings.errors import ConfigError
from tests.engine.helpers import deltas_of, hand_over, request
from tests.engine.tiny import (
    CHUNK_TOKENS,
    make_runner,
    tiny_engine,
    tiny_params,
    tiny_placement,
    tiny_traits,
)

LAYERS, WIDTH, VOCAB = 2, 16, 97
# (heads, KV heads): divided among 2 and 4 devices; replicated on 4, or on both; filled up.
HEADS = {"divided": (8, 4), "replicated": (8, 2), "one KV head": (4, 1), "filled up": (9, 3)}
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (2, 4), (4, 2), (4, 4)]


@functools.cache
def runner_of(
    heads: str, shards: int, first_device: int, roles: Role, dtype: Any = np.float32
) -> JaxRunner:
    """On devices of its own where there are enough; warmed up."""
    query, key = HEADS[heads]
    traits = tiny_traits(num_attention_heads=query, num_key_value_heads=key, head_dim=WIDTH)
    placement = tiny_placement(traits, "auto", shards, first_device=first_device)
    block_size = 8 if roles is Role.PREFILL else 16
    runner = make_runner(tiny_params(placement, dtype), placement, roles, block_size, dtype)
    runner.warm_up()
    return runner


def pair(heads: str, prefill: int, decode: int, dtype: Any = np.float32) -> tuple[JaxRunner, ...]:
    return (
        runner_of(heads, prefill, 0, Role.PREFILL, dtype),
        runner_of(heads, decode, 4 - decode, Role.DECODE, dtype),
    )


def slots(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def put(runner: JaxRunner, first: int, count: int, arrays: KVArrays) -> None:
    runner.run(StepPlan((ImportKV(0, 0, slots(first, count), arrays),)))


def taken(runner: JaxRunner, first: int, count: int, on_device: bool = False) -> KVArrays:
    plan = StepPlan((ExportKV(0, 0, count, slots(first, count), on_device),))
    return runner.run(plan).exported[0]


def random_kv(heads: int, count: int, dtype: Any) -> KVArrays:
    rng = np.random.default_rng(count)
    shape = (LAYERS, count, heads, WIDTH)
    return tuple(rng.standard_normal(shape).astype(dtype) for _ in "kv")


@pytest.mark.parametrize(("prefill", "decode"), MESHES)
@pytest.mark.parametrize("heads", HEADS)
def test_bits_arrive_on_any_mesh_from_any_mesh(heads: str, prefill: int, decode: int) -> None:
    """In whole and in partial chunks, and with nothing compiled after warm-up."""
    source, target = pair(heads, prefill, decode)
    compiled = [runner.compiles_after_warm_up for runner in (source, target)]
    for count in (1, 7, CHUNK_TOKENS):
        wanted = random_kv(HEADS[heads][1], count, np.float32)
        marks = tuple(np.full_like(array[:, :1], 5.0) for array in wanted)
        put(source, 3, count, wanted)
        put(target, 40 + count, 1, marks)
        moved = taken(source, 3, count, on_device=True)
        assert {array.shape[1] for array in moved} == {CHUNK_TOKENS}
        assert {len(array.sharding.device_set) for array in moved} == {prefill}
        put(target, 40, count, moved)
        for found, array in zip(taken(target, 40, count), wanted, strict=True):
            assert found.tobytes() == array.tobytes()
        for found, mark in zip(taken(target, 40 + count, 1), marks, strict=True):
            assert np.array_equal(found, mark), "padding must not be written"
    assert [runner.compiles_after_warm_up for runner in (source, target)] == compiled


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 2), (4, 1)])
def test_bfloat16_bits(prefill: int, decode: int) -> None:
    """Whose pools hold them as uint16 on CPU."""
    source, target = pair("replicated", prefill, decode, ml_dtypes.bfloat16)
    wanted = random_kv(2, 9, ml_dtypes.bfloat16)
    put(source, 0, 9, wanted)
    moved = taken(source, 0, 9, on_device=True)
    assert {array.dtype for array in moved} == {np.dtype(ml_dtypes.bfloat16)}
    put(target, 5, 9, moved)
    for found, array in zip(taken(target, 5, 9), wanted, strict=True):
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("heads", ["divided", "filled up"])
def test_engines_on_equally_many_devices_do_not_use_the_host(
    heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair(heads, 2, 2)
    put(source, 0, 5, random_kv(HEADS[heads][1], 5, np.float32))
    moved = taken(source, 0, 5, on_device=True)

    def fetched(_: jax.Array) -> None:
        raise AssertionError("a device array was read by the host")

    monkeypatch.setattr(type(moved[0]), "_value", property(fetched))
    put(target, 0, 5, moved)


def test_engines_on_one_cpu_device_each_share_a_chunk_instead_of_copying_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = pair("divided", 1, 1)
    wanted = random_kv(4, 5, np.float32)
    put(source, 0, 5, wanted)
    moved = taken(source, 0, 5, on_device=True)

    def copied(*_: object) -> None:
        raise AssertionError("a chunk was copied from device to device")

    monkeypatch.setattr(jax, "device_put", copied)
    put(target, 3, 5, moved)
    for found, array in zip(taken(target, 3, 5), wanted, strict=True):
        assert found.tobytes() == array.tobytes()


def test_an_export_on_devices_is_a_copy_of_its_own() -> None:
    (source, _) = pair("divided", 2, 2)
    wanted = random_kv(4, 6, np.float32)
    put(source, 0, 6, wanted)
    moved = taken(source, 0, 6, on_device=True)
    put(source, 0, 6, tuple(np.zeros_like(array) for array in wanted))
    for found, array in zip(moved, wanted, strict=True):
        assert np.asarray(found)[:, :6].tobytes() == array.tobytes()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 2)])
def test_a_request_handed_over_on_devices_gives_the_same_tokens(prefill: int, decode: int) -> None:
    prompt = tuple((31 * i * i + 5 * i) % VOCAB for i in range(30))
    source, target = pair("filled up", prefill, decode)
    answers = []
    for on_device in (False, True):
        deltas = hand_over(
            tiny_engine(source),
            tiny_engine(target),
            lambda roles: request("r", prompt, roles, b"t", seed=3, max_tokens=12),
            piece=7,
            on_device=on_device,
        )
        assert deltas_of(deltas, "r") == deltas
        answers.append([token for delta in deltas for token in delta.tokens])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12


def test_compiles_are_those_of_the_thread_that_runs_the_engine() -> None:
    """In one process, another worker's warm-up is no compile after this one's."""
    counter = CompileCounter()
    compile_anew()
    assert counter.count == 0
    counter.watch_this_thread()
    compile_anew()
    assert counter.count == 1
    other = threading.Thread(target=compile_anew)
    other.start()
    other.join()
    assert counter.count == 1


def compile_anew() -> None:
    jax.jit(lambda x: x + 1).lower(np.int32(1)).compile()


def test_workers_of_one_process_that_have_too_few_devices_are_refused() -> None:
    there = len(jax.local_devices())
    assert _devices(2, there - 2) == jax.local_devices()[-2:]
    wanted = rf"--tensor_parallel_size=2: 2 devices are needed beside the {there - 1} of other"
    with pytest.raises(ConfigError, match=f"{wanted} workers, this process has {there} cpu"):
        _devices(2, there - 1)
