"""Weights from checkpoints: converted exactly, and refused where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint.errors import CheckpointError
from engine.loading import (
    dummy_params,
    dummy_tensors,
    fingerprint,
    load_params,
    weights_identity,
)
from engine.models.decoder import Params
from engine.models.traits import Traits
from engine.models.weights import Kind, declare_weights
from tests.engine.tiny import CONFIG, MAX_MODEL_LEN, tiny_placement, tiny_tensors, tiny_traits


def write(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def in_checkpoint_order(params: Params, traits: Traits) -> dict[str, np.ndarray]:
    """The tensors of `params` of the reference kernels, named and laid out as in a checkpoint."""
    tensors = {}
    for name, weight in declare_weights(traits).items():
        if weight.kind is Kind.BIAS:
            stacked = np.asarray(params[name.removesuffix("_bias")].bias)
        elif weight.kind is Kind.LINEAR:
            stacked = np.asarray(params[name].matrix).swapaxes(1, 2)
        elif weight.kind is Kind.HEAD:
            stacked = np.asarray(params[name].matrix)[None]
        else:
            stacked = np.asarray(params[name])
        layers = list(stacked) if weight.kind is not Kind.EMBEDDING else [stacked]
        tensors |= dict(zip(weight.source_names(), layers, strict=True))
    return tensors


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, ml_dtypes.bfloat16])
def test_what_is_loaded_is_what_was_stored(tmp_path: Path, stored: type, wanted: type) -> None:
    traits = tiny_traits(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    tensors = {name: tensor.astype(stored) for name, tensor in tiny_tensors(traits).items()}
    loaded = load_params(write(tmp_path, tensors), tiny_placement(traits), wanted, MAX_MODEL_LEN)
    found = in_checkpoint_order(loaded, traits)
    assert found.keys() == tensors.keys()
    for name, array in found.items():
        assert array.dtype == wanted
        assert np.array_equal(array, tensors[name].astype(wanted)), name


def test_dummy_weights_are_the_same_for_one_seed_alone() -> None:
    traits = tiny_traits(attention_bias=True)
    placement = tiny_placement(traits)
    params = dummy_params(placement, np.float32, MAX_MODEL_LEN, seed=1)
    one = in_checkpoint_order(params, traits)
    same, other = dummy_tensors(traits, 1), dummy_tensors(traits, 2)
    for name, tensor in one.items():
        assert np.array_equal(tensor, same(name))
    q, next_q = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    assert not np.array_equal(one[q], other(q))
    assert not np.array_equal(one[q], one[next_q])
    assert (one["model.norm.weight"] == 1).all()
    assert not one["model.layers.1.self_attn.q_proj.bias"].any()


def test_extra_tensors_that_say_nothing_new_are_ignored(tmp_path: Path) -> None:
    """A tied checkpoint's own head, and the frequencies that old checkpoints carry."""
    traits = tiny_traits()
    tensors = tiny_tensors(traits)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    loaded = load_params(
        write(tmp_path, tensors), tiny_placement(traits), np.float32, MAX_MODEL_LEN
    )
    assert in_checkpoint_order(loaded, traits).keys() == tiny_tensors(traits).keys()


Edit = Callable[[dict[str, np.ndarray]], Any]


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"1 weights are missing: model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if "layers.1" in name],
            r"9 weights are missing: .*, …",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.zeros((48, 32))}),
            r"1 weights are left over.*: model\.layers\.2\.mlp\.up_proj\.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(32)}),
            r"1 weights are left over.*: model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(33)}),
            r"model\.norm\.weight has shape \(33,\), config\.json makes it \(64,\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": np.zeros((64, 32))}),
            r"k_proj\.weight has shape \(64, 32\), config\.json makes it \(32, 64\)",
        ),
    ],
    ids=["missing", "missing layer", "layer too many", "bias left over", "norm", "transposed"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, edit: Edit, complaint: str
) -> None:
    traits = tiny_traits()
    tensors = tiny_tensors(traits)
    edit(tensors)
    with pytest.raises(CheckpointError, match=complaint) as error:
        load_params(write(tmp_path, tensors), tiny_placement(traits), np.float32, MAX_MODEL_LEN)
    assert str(tmp_path) in str(error.value)


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    traits = tiny_traits()
    tensors = tiny_tensors(traits)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not model\.embed.*tie_word_emb"):
        load_params(write(tmp_path, tensors), tiny_placement(traits), np.float32, MAX_MODEL_LEN)


def test_an_untied_checkpoint_needs_its_head(tmp_path: Path) -> None:
    tied = tiny_traits()
    write(tmp_path, tiny_tensors(tied))
    untied = tiny_traits(tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load_params(tmp_path, tiny_placement(untied), np.float32, MAX_MODEL_LEN)


def test_identity_tells_models_apart(tmp_path: Path) -> None:
    traits = tiny_traits()
    tensors = tiny_tensors(traits)
    identities = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        identities.append(weights_identity(write(folder, tensors)))
        if number == 1:
            tensors["model.layers.1.mlp.down_proj.weight"][0, 3] += 1
    assert identities[0] == identities[1] != identities[2]
    names = {
        fingerprint(config, dtype, source)
        for config in (CONFIG, CONFIG | {"rope_theta": 1.0})
        for dtype in ("float32", "bfloat16")
        for source in identities[1:]
    }
    assert len(names) == 8
    assert fingerprint({"a": 1, "b": 2}, "f", "s") == fingerprint({"b": 2, "a": 1}, "f", "s")
