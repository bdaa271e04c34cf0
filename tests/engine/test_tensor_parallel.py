"""A model on 2 and 4 devices answers as on one; what does not divide is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from engine.events import Add
from engine.jax_runner import JaxRunner
from engine.models.heads import NO_HEAD, UnsupportedParallelism, lay_out_heads
from engine.plan import CopyBlocks, ExportKV, ImportKV, StepPlan
from engine.types import Role
from tests.engine.helpers import deltas_of, hand_over, request, run
from tests.engine.tiny import (
    make_runner,
    tiny_engine,
    tiny_params,
    tiny_placement,
    tiny_traits,
)

# (heads, KV heads): divided by 2 and 4; KV heads replicated; filled up as in the demo model.
HEADS = {"divided": (8, 4), "replicated": (8, 2), "one KV head": (4, 1), "filled up": (9, 3)}
MODELS: dict[str, dict[str, Any]] = {
    name: {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": name != "divided",
    }
    for name, (heads, kv_heads) in HEADS.items()
}  # fmt: skip


@functools.cache
def runner_of(model: str, shards: int, roles: Role, block_size: int = 8) -> JaxRunner:
    placement = tiny_placement(tiny_traits(**MODELS[model]), "reference", shards)
    return make_runner(tiny_params(placement), placement, roles, block_size)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((31 * i * i + 5 * i + length) % 97 for i in range(length))


def handed_over(model: str, prefill: int, decode: int, length: int) -> tuple[int, ...]:
    """A prompt computed on `prefill` shards and decoded on `decode` shards."""
    deltas = hand_over(
        tiny_engine(runner_of(model, prefill, Role.PREFILL, 8)),
        tiny_engine(runner_of(model, decode, Role.DECODE, 16)),
        lambda roles: request(
            "r", prompt_of(length), roles, b"t", temperature=1.0, seed=3, max_tokens=12
        ),
        piece=7,
    )
    assert deltas_of(deltas, "r") == deltas
    return tuple(token for delta in deltas for token in delta.tokens)


@pytest.mark.parametrize("model", ["replicated", "filled up"])
def test_every_number_of_shards_gives_the_same_tokens(model: str) -> None:
    answers = {length: handed_over(model, 1, 1, length) for length in (1, 20, 61)}
    assert len(set.union(*map(set, answers.values()))) > 5
    for prefill, decode in ((2, 4), (4, 1)):
        for length, wanted in answers.items():
            assert handed_over(model, prefill, decode, length) == wanted, (prefill, decode)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("model", HEADS)
def test_kv_leaves_and_enters_in_the_models_heads(model: str, shards: int) -> None:
    """However many heads the pools have; and blocks are copied on every shard."""
    runner = runner_of(model, shards, Role.DECODE)
    heads = HEADS[model][1]
    rng = np.random.default_rng(0)
    arrays = tuple(rng.standard_normal((2, 8, heads, 16)).astype(np.float32) for _ in "kv")
    slots = np.arange(24, 32, dtype=np.int32)
    target = np.arange(40, 48, dtype=np.int32)
    plan = StepPlan(
        (
            ImportKV(0, 0, slots, arrays),
            CopyBlocks((3,), (5,)),
            ExportKV(1, 0, 8, slots),
            ExportKV(2, 1, 8, target[1:]),
        )
    )
    exported = runner.run(plan).exported
    for name, found in zip("kv", exported[1], strict=True):
        assert np.array_equal(found, arrays["kv".index(name)])
    for name, found in zip("kv", exported[2], strict=True):
        assert np.array_equal(found, arrays["kv".index(name)][:, 1:])


def test_each_device_holds_its_part_alone() -> None:
    runner = runner_of("divided", 4, Role.DECODE)
    assert len(jax.devices()) >= 4
    for pool in runner._pools:
        assert {shard.data.shape[3] for shard in pool.addressable_shards} == {1}
    for name in ("q", "gate", "down", "head"):
        matrix = runner._params[name].matrix
        (size,) = {shard.data.nbytes for shard in matrix.addressable_shards}
        assert size * 4 == matrix.nbytes or name == "head"  # a vocabulary of 97 is filled up


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_sharded_step_answers_alone_and_together(dtype: type) -> None:
    placement = tiny_placement(tiny_traits(**MODELS["replicated"]), "reference", 4)
    runner = make_runner(tiny_params(placement, dtype), placement, dtype=dtype)
    requests = [request(str(n), prompt_of(n), temperature=0.0, max_tokens=8) for n in (3, 9, 30)]
    engine = tiny_engine(runner)
    for each in requests:
        engine.submit(Add(each))
    events = run(engine)
    for each in requests:
        alone = tiny_engine(runner)
        alone.submit(Add(each))
        name = each.id.attempt.request_id
        assert deltas_of(events, name) == deltas_of(run(alone), name)


# ---- the layout of heads ----


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shards", "q", "kv"),
    [
        (4, 2, 1, (0, 1, 2, 3), (0, 1)),
        (4, 2, 2, (0, 1, 2, 3), (0, 1)),
        (8, 2, 4, tuple(range(8)), (0, 0, 1, 1)),
        (4, 1, 2, (0, 1, 2, 3), (0, 0)),
        (6, 3, 2, (0, 1, 2, 3, 4, 5, NO_HEAD, NO_HEAD), (0, 1, 2, NO_HEAD)),
        (3, 3, 4, (0, 1, 2, NO_HEAD), (0, 1, 2, NO_HEAD)),
    ],
)
def test_heads_lie_with_their_kv_heads(
    heads: int, kv_heads: int, shards: int, q: tuple[int, ...], kv: tuple[int, ...]
) -> None:
    layout = lay_out_heads(heads, kv_heads, shards)
    assert (layout.q, layout.kv) == (q, kv)
    assert [layout.kv[place] for place in layout.kv_places(kv_heads)] == list(range(kv_heads))
    per_q, per_kv = len(q) // shards, len(kv) // shards
    for shard in range(shards):
        own = q[shard * per_q : (shard + 1) * per_q]
        own_kv = kv[shard * per_kv : (shard + 1) * per_kv]
        for place, head in enumerate(own):
            if head != NO_HEAD:
                assert own_kv[place * per_kv // per_q] == head * kv_heads // heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shards"), [(4, 2, 8), (9, 3, 8), (5, 5, 4), (2, 2, 3)]
)
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, shards: int) -> None:
    with pytest.raises(UnsupportedParallelism, match=f"--tensor_parallel_size={shards} .*{heads}"):
        lay_out_heads(heads, kv_heads, shards)


def test_a_width_that_does_not_divide_is_refused() -> None:
    traits = tiny_traits(
        num_attention_heads=6, num_key_value_heads=3, head_dim=16, intermediate_size=50
    )
    with pytest.raises(UnsupportedParallelism, match="does not divide intermediate_size=50"):
        tiny_placement(traits, "reference", 3)
