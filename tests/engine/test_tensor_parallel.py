"""A model on 2 and 4 devices answers as on one; what does not divide is refused."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from engine.batches import pack_batch
from engine.events import Add
from engine.jax_runner import JaxRunner
from engine.models.decoder import Params
from engine.models.heads import NO_HEAD, UnsupportedParallelism, lay_out_heads
from engine.placing import Placement, place_params
from engine.plan import BatchRow, CopyBlocks, ExportKV, ImportKV, StepPlan
from engine.types import AttemptId, Role, SequenceId
from tests.engine.helpers import deltas_of, hand_over, request, run, untimed
from tests.engine.tiny import (
    MAX_MODEL_LEN,
    make_runner,
    tiny_engine,
    tiny_params,
    tiny_placement,
    tiny_tensors,
    tiny_traits,
)

# (heads, KV heads): divided by 2 and 4; KV heads replicated; filled up as in the demo model; both.
HEADS = {
    "divided": (8, 4), "replicated": (8, 2), "one KV head": (4, 1), "filled up": (9, 3),
    "both": (6, 2),
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    name: {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": name != "divided",
    }
    for name, (heads, kv_heads) in HEADS.items()
}  # fmt: skip


KERNELS = ("reference", "cpu")


@functools.cache
def runner_of(model: str, kernels: str, shards: int, roles: Role, block_size: int = 8) -> JaxRunner:
    placement = tiny_placement(tiny_traits(**MODELS[model]), kernels, shards)
    return make_runner(tiny_params(placement), placement, roles, block_size)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((31 * i * i + 5 * i + length) % 97 for i in range(length))


def handed_over(
    model: str, kernels: str, prefill: int, decode: int, length: int
) -> tuple[int, ...]:
    """A prompt computed on `prefill` shards and decoded on `decode` shards."""
    deltas = hand_over(
        tiny_engine(runner_of(model, kernels, prefill, Role.PREFILL, 8)),
        tiny_engine(runner_of(model, kernels, decode, Role.DECODE, 16)),
        lambda roles: request(
            "r", prompt_of(length), roles, b"t", temperature=1.0, seed=3, max_tokens=12
        ),
        piece=7,
    )
    assert deltas_of(deltas, "r") == deltas
    return tuple(token for delta in deltas for token in delta.tokens)


@pytest.mark.parametrize(
    ("model", "kernels"), [("replicated", "reference"), *((model, "cpu") for model in HEADS)]
)
def test_every_number_of_shards_gives_the_same_tokens(model: str, kernels: str) -> None:
    answers = {n: handed_over(model, kernels, 1, 1, n) for n in (1, 20, 61)}
    assert len(set.union(*map(set, answers.values()))) > 5
    for prefill, decode in ((2, 4), (4, 1)):
        for length, wanted in answers.items():
            found = handed_over(model, kernels, prefill, decode, length)
            assert found == wanted, (prefill, decode)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_kv_leaves_and_enters_in_the_models_heads(model: str, shards: int, kernels: str) -> None:
    """However many heads the pools have; and blocks are copied on every shard."""
    runner = runner_of(model, kernels, shards, Role.DECODE)
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


@pytest.mark.parametrize("kernels", KERNELS)
def test_each_device_holds_its_part_alone(kernels: str) -> None:
    runner = runner_of("divided", kernels, 4, Role.DECODE)
    for pool in runner._pools[0]:
        assert {shard.data.shape[3] for shard in pool.addressable_shards} == {1}
    for name in ("q", "k", "v", "o", "gate", "up", "down", "head"):
        matrix = runner._params[name].matrix
        (size,) = {shard.data.nbytes for shard in matrix.addressable_shards}
        assert size * 4 == matrix.nbytes, name


@pytest.mark.parametrize("kernels", KERNELS)
def test_parts_of_a_sum_are_rounded_together(kernels: str) -> None:
    """In bfloat16 four devices are as near to float32 as one, where their parts cancel."""
    rng = np.random.default_rng(0)
    traits = tiny_traits(**MODELS["replicated"])
    tensors = tiny_tensors(traits)
    for layer in range(traits.layers):
        down = rng.standard_normal((traits.hidden, traits.ffn)).astype(np.float32) * 30
        down[:, traits.ffn // 2 :] = -down[:, : traits.ffn // 2]
        for name in ("gate", "up"):
            key = f"model.layers.{layer}.mlp.{name}_proj.weight"
            tensors[key][traits.ffn // 2 :] = tensors[key][: traits.ffn // 2] * 1.01
            bias = f"model.layers.{layer}.mlp.{name}_proj.bias"
            tensors[bias][traits.ffn // 2 :] = tensors[bias][: traits.ffn // 2]
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = down
    logits = {}
    for dtype, shards in ((np.float32, 1), (ml_dtypes.bfloat16, 1), (ml_dtypes.bfloat16, 4)):
        placement = tiny_placement(traits, kernels, shards, dtype)
        params = place_params(placement, tensors.__getitem__, dtype, MAX_MODEL_LEN)
        logits[np.dtype(dtype).name, shards] = logits_of(params, placement, dtype)
    exact = logits["float32", 1]
    one, four = (np.abs(logits["bfloat16", n] - exact).max() for n in (1, 4))
    assert four < 2 * one


def logits_of(params: Params, placement: Placement, dtype: type) -> np.ndarray:
    """float32 [vocab], after a prompt of 20 tokens."""
    runner = make_runner(params, placement, dtype=dtype)
    shape = runner._shapes[-1]
    table = np.arange(3, dtype=np.int32)
    row = BatchRow(SequenceId(AttemptId("r", 0), 0), prompt_of(20), 0, table, 0, None)
    last = runner._last_tokens
    program = runner._programs.forward(shape, params, runner._pools, last)
    result, _, _ = program(params, runner._pools, pack_batch((row,), shape), last)
    return np.asarray(result)[0]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_sharded_step_answers_alone_and_together(dtype: type) -> None:
    placement = tiny_placement(tiny_traits(**MODELS["replicated"]), "auto", 4, dtype)
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
        assert untimed(deltas_of(events, name)) == untimed(deltas_of(run(alone), name))


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
        (6, 2, 4, (0, 1, 2, NO_HEAD, 3, 4, 5, NO_HEAD), (0, 0, 1, 1)),
        (12, 2, 8, (*range(12), *(NO_HEAD,) * 4), (0, 0, 0, 1, 1, 1, NO_HEAD, NO_HEAD)),
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


def test_many_query_heads_on_few_devices_more_than_kv_heads() -> None:
    """Phi-4 on 8 devices: 10 KV heads, each on two, rather than 24 empty query heads of 64."""
    layout = lay_out_heads(40, 10, 8)
    assert (len(layout.q), len(layout.kv)) == (48, 24)


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
