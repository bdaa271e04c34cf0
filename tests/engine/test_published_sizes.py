"""Published models: exactly their parameters, and a layout for the numbers of devices they need."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from engine.models.families import traits_of
from engine.models.heads import NO_HEAD, UnsupportedParallelism, lay_out_heads
from engine.models.weights import declare_weights, parameter_count
from engine.placing import mlp_widths
from engine.sharding import MODEL_AXIS, sharding_of
from tests.engine.published_sizes import PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_parameters(name: str) -> None:
    traits = traits_of(PUBLISHED[name].config)
    declared = declare_weights(traits)
    tree = jax.eval_shape(
        lambda: {
            key: jnp.zeros((*weight.stack, *weight.shape), jnp.bfloat16)
            for key, weight in declared.items()
        }
    )
    count = sum(math.prod(array.shape) for array in jax.tree.leaves(tree))
    assert count == parameter_count(traits) == PUBLISHED[name].parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_divides_among_its_devices(name: str) -> None:
    """Heads with their KV heads, empty ones counted, and every matrix by its axes."""
    traits = traits_of(PUBLISHED[name].config)
    for shards in PUBLISHED[name].shards:
        heads = lay_out_heads(traits.heads, traits.kv_heads, shards)
        assert sorted(head for head in heads.q if head != NO_HEAD) == list(range(traits.heads))
        assert len(heads.q) % shards == len(heads.kv) % shards == 0
        assert len(heads.q) % len(heads.kv) == 0
        assert all(width % (2 * shards) == 0 for width in mlp_widths(traits).values())
        mesh = AbstractMesh((shards,), (MODEL_AXIS,))
        widths = {"heads": len(heads.q), "kv_heads": len(heads.kv)}
        for weight in declare_weights(traits).values():
            sizes = zip(weight.axes, weight.shape, strict=True)
            shape = [
                widths[axis] * traits.head_dim
                if axis in widths
                else -(-size // shards) * shards
                if axis == "vocab"
                else size
                for axis, size in sizes
            ]
            sharding = sharding_of(weight.axes, mesh)
            assert isinstance(sharding, NamedSharding)
            parts = math.prod(shape) // math.prod(sharding.shard_shape(tuple(shape)))
            sharded = {"heads", "kv_heads", "ffn", "vocab"} & set(weight.axes)
            assert parts == (shards if sharded else 1), weight.source


def test_what_does_not_divide_names_the_flag() -> None:
    traits = traits_of(PUBLISHED["Qwen-2/2.5 0.5B"].config)
    with pytest.raises(UnsupportedParallelism, match=r"--tensor_parallel_size=32 .*14 query heads"):
        lay_out_heads(traits.heads, traits.kv_heads, 32)
