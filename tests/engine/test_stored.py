"""Checkpoints as the families keep them: joined, turned, offset, under other names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint.errors import CheckpointError
from engine.kernels.quantized import Quantized
from engine.loading import load_params
from engine.models.families import traits_of
from engine.models.stored import Part, in_checkpoint
from engine.models.weights import declare_weights, stored_parts
from engine.placing import place_params
from tests.engine.tiny import MAX_MODEL_LEN, tiny_placement, tiny_traits
from tests.golden.family_models import VARIANTS, stored_tensors

Tensors = dict[str, np.ndarray]


def in_multimodal(name: str) -> str:
    return "language_model." + name


def without_prefix(name: str) -> str:
    return name.removeprefix("model.")


def under_model(name: str) -> str:
    prefix = "" if name.startswith("lm_head") else "model.language_model."
    return prefix + name.removeprefix("model.")


@pytest.mark.parametrize("spelled", [str, in_multimodal, without_prefix, under_model])
@pytest.mark.parametrize("variant", ["gemma3", "llama4", "mixtral", "phi3", "qwen3_moe"])
def test_a_checkpoint_is_found_under_every_prefix(
    tmp_path: Path, variant: str, spelled: Callable[[str], str]
) -> None:
    """Beside what sees images, which is left alone."""
    config = VARIANTS[variant]
    tensors = stored_tensors(config, 0)
    stored = {spelled(name): tensor for name, tensor in tensors.items()}
    stored["vision_tower.patch.weight"] = np.ones(3, np.float32)
    stored["model.multi_modal_projector.weight"] = np.ones(3, np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    traits = traits_of(config)
    placement, parts = tiny_placement(traits, shards=2), stored_parts(traits)
    wanted = place_params(
        placement,
        lambda name: parts[name].take(lambda tensor, index: tensors[tensor][index]),
        np.float32,
        MAX_MODEL_LEN,
    )
    found = load_params(tmp_path, placement, np.float32, MAX_MODEL_LEN)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, wanted))


def test_joined_matrices_are_cut_in_the_order_of_their_names() -> None:
    traits = traits_of(VARIANTS["phi3"])
    tensors = stored_tensors(VARIANTS["phi3"], 0)
    parts = stored_parts(traits)

    def take(name: str) -> np.ndarray:
        part = parts[f"model.layers.1.{name}.weight"]
        return part.take(lambda tensor, index: tensors[tensor][index])

    qkv = tensors["model.layers.1.self_attn.qkv_proj.weight"]
    q, k, v = (take(f"self_attn.{name}_proj") for name in "qkv")
    assert q.shape == (64, 64)
    assert k.shape == v.shape == (32, 64)
    assert np.array_equal(np.concatenate([q, k, v]), qkv)
    gate, up = take("mlp.gate_proj"), take("mlp.up_proj")
    assert np.array_equal(
        np.concatenate([gate, up]), tensors["model.layers.1.mlp.gate_up_proj.weight"]
    )


def test_experts_in_one_tensor_are_taken_out_and_turned() -> None:
    traits = traits_of(VARIANTS["llama4"])
    tensors = stored_tensors(VARIANTS["llama4"], 0)
    parts = stored_parts(traits)
    joined = tensors["model.layers.2.feed_forward.experts.gate_up_proj"]
    for first, name in ((0, "gate"), (48, "up")):
        part = parts[f"model.layers.2.mlp.experts.3.{name}_proj.weight"]
        found = part.take(lambda tensor, index: tensors[tensor][index])
        assert np.array_equal(found, joined[3][:, first : first + 48].T)


def test_pairs_side_by_side_are_moved_half_a_head_apart() -> None:
    part = Part("q", (8, 1), pairs=4)
    found = part.take(lambda tensor, index: np.arange(8.0)[:, None][index])
    assert found[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_offset_norms_stay_float32() -> None:
    """1 + w would lose most of w in bfloat16."""
    config = VARIANTS["gemma2"]
    traits, tensors = traits_of(config), stored_tensors(config, 0)
    parts = stored_parts(traits)
    stored = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    params = place_params(
        tiny_placement(traits, dtype=ml_dtypes.bfloat16),
        lambda name: parts[name].take(lambda tensor, index: stored[tensor][index]),
        ml_dtypes.bfloat16,
        MAX_MODEL_LEN,
    )
    name = "model.layers.3.post_feedforward_layernorm.weight"
    assert params["mlp_post_norm"].dtype == np.float32
    assert np.array_equal(params["mlp_post_norm"][3], stored[name].astype(np.float32) + 1)
    assert params["q"].matrix.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_experts_are_quantized_and_their_router_is_not(kernels: str) -> None:
    config = VARIANTS["mixtral"]
    traits, tensors = traits_of(config), stored_tensors(config, 0)
    parts = stored_parts(traits)
    params = place_params(
        tiny_placement(traits, kernels, shards=2),
        lambda name: parts[name].take(lambda tensor, index: tensors[tensor][index]),
        np.float32,
        MAX_MODEL_LEN,
        "int8",
    )
    experts = params["expert_gate"].matrix
    assert isinstance(experts, Quantized)
    assert experts.values.shape[:2] == experts.scales.shape[:2] == (2, 4)
    w1 = tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    wanted = np.abs(w1).max(axis=1) / np.float32(127)
    assert np.array_equal(experts.scales[1, 2], wanted)
    assert params["router"].matrix.dtype == np.float32


def test_every_tensor_of_a_checkpoint_is_read_whole() -> None:
    """What is read of joined tensors are all of their outputs, once."""
    for config in VARIANTS.values():
        traits = traits_of(config)
        read: dict[str, int] = {}
        shapes = {part.tensor: part.shape for part in stored_parts(traits).values()}
        declared = {
            name: weight
            for weight in declare_weights(traits).values()
            for name in weight.source_names()
        }
        for name, part in stored_parts(traits).items():
            read[part.tensor] = read.get(part.tensor, 0) + int(np.prod(declared[name].shape))
        assert read == {name: int(np.prod(shape)) for name, shape in shapes.items()}


def test_the_prefix_is_that_of_the_embedding() -> None:
    spelled = in_checkpoint({"language_model.model.embed_tokens.weight", "lm_head.weight"})
    assert spelled("model.norm.weight") == "language_model.model.norm.weight"
    assert spelled("lm_head.weight") == "lm_head.weight"


Edit = Callable[[Tensors], Any]


@pytest.mark.parametrize(
    ("variant", "edit", "complaint"),
    [
        (
            "mixtral",
            lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w2.weight"),
            r"1 weights are missing: model\.layers\.1\.block_sparse_moe\.experts\.2\.w2\.weight",
        ),
        (
            "mixtral",
            lambda t: t.update(
                {"model.layers.1.block_sparse_moe.experts.4.w2.weight": np.zeros(1)}
            ),
            r"1 weights are left over.*: model\.layers\.1\.block_sparse_moe\.experts\.4\.w2",
        ),
        (
            "phi3",
            lambda t: t.update({"model.layers.0.self_attn.qkv_proj.weight": np.zeros((64, 64))}),
            r"qkv_proj\.weight has shape \(64, 64\), config\.json makes it \(128, 64\)",
        ),
        (
            "llama4",
            lambda t: t.update(
                {"model.layers.0.feed_forward.experts.gate_up_proj": np.zeros((4, 32, 48))}
            ),
            r"gate_up_proj has shape \(4, 32, 48\), config\.json makes it \(4, 32, 96\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, variant: str, edit: Edit, complaint: str
) -> None:
    tensors = stored_tensors(VARIANTS[variant], 0)
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    placement = tiny_placement(traits_of(VARIANTS[variant]))
    with pytest.raises(CheckpointError, match=complaint):
        load_params(tmp_path, placement, np.float32, MAX_MODEL_LEN)


def test_a_dense_model_has_no_experts() -> None:
    assert not {"router", "expert_up", "shared_up"} & declare_weights(tiny_traits()).keys()
