"""Models whose weights are quantized when they are loaded: `--quantization int8`."""

from __future__ import annotations

import functools
import json
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint.errors import CheckpointError
from engine.build import build_engine
from engine.events import Add
from engine.jax_runner import JaxRunner
from engine.kernels.quantized import Quantized
from engine.loading import load_params
from engine.models.families import traits_of
from engine.models.weights import Kind, declare_weights
from engine.placing import place_params
from engine.types import COLOCATED, Role
from settings.config import EngineConfig, ModelConfig
from tests.engine.helpers import hand_over, output_of, request, run
from tests.engine.tiny import (
    CHUNK_TOKENS,
    MAX_MODEL_LEN,
    make_runner,
    tiny_engine,
    tiny_params,
    tiny_placement,
    tiny_tensors,
    tiny_traits,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny"


# ---- loading ----


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_quantized_from_what_was_stored(
    tmp_path: Path, stored: type, tied: bool
) -> None:
    """However few bits the activations have; norms and biases stay as they are."""
    traits = tiny_traits(attention_bias=True, mlp_bias=True, tie_word_embeddings=tied)
    tensors = {name: tensor.astype(stored) for name, tensor in tiny_tensors(traits).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    params = load_params(
        tmp_path, tiny_placement(traits), ml_dtypes.bfloat16, MAX_MODEL_LEN, "int8"
    )
    for name, weight in declare_weights(traits).items():
        for layer, source in enumerate(weight.source_names()):
            if weight.kind is Kind.BIAS:
                found = params[name.removesuffix("_bias")].bias[layer]
                assert np.array_equal(found, tensors[source].astype(ml_dtypes.bfloat16)), source
                continue
            if weight.kind is Kind.VECTOR:
                wanted = tensors[source].astype(ml_dtypes.bfloat16)
                assert np.array_equal(params[name][layer], wanted), source
                continue
            matrix = params[name] if weight.kind is Kind.EMBEDDING else params[name].matrix
            assert isinstance(matrix, Quantized)
            assert matrix.dtype == ml_dtypes.bfloat16
            values, scales = np.asarray(matrix.values), np.asarray(matrix.scales)
            if weight.kind is Kind.LINEAR:
                values, scales = values[layer].T, scales[layer]
            wide = tensors[source].astype(np.float32)
            wanted = np.abs(wide).max(axis=1) / np.float32(127)
            assert np.array_equal(scales, wanted), source
            assert np.array_equal(values, np.rint(wide / wanted[:, None])), source


def test_tensors_are_read_once_and_let_go() -> None:
    """Never more of them at once than there are readers, beside the one that is packed."""
    traits = tiny_traits(num_hidden_layers=12)
    tensors = tiny_tensors(traits)
    reads: Counter[str] = Counter()
    alive: set[int] = set()
    most, lock = 0, threading.Lock()

    def read(name: str) -> np.ndarray:
        nonlocal most
        tensor = tensors[name].copy()
        with lock:
            reads[name] += 1
            alive.add(id(tensor))
            most = max(most, len(alive))
        weakref.finalize(tensor, alive.discard, id(tensor))
        return tensor

    place_params(tiny_placement(traits), read, np.float32, MAX_MODEL_LEN, "int8")
    assert set(reads.values()) == {1}
    assert reads.keys() == tensors.keys()
    assert most <= 5
    assert not alive


def test_a_matrix_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    traits = tiny_traits()
    tensors = tiny_tensors(traits)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        load_params(tmp_path, tiny_placement(traits), np.float32, MAX_MODEL_LEN, "int8")


# ---- shards ----

MODELS: dict[str, dict[str, Any]] = {
    name: {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": name != "divided",
    }
    for name, (heads, kv_heads) in {
        "divided": (8, 4), "replicated": (8, 2), "filled up": (9, 3),
    }.items()
}  # fmt: skip


@functools.cache
def runner_of(model: str, kernels: str, shards: int, roles: Role = COLOCATED) -> JaxRunner:
    placement = tiny_placement(tiny_traits(**MODELS[model]), kernels, shards)
    return make_runner(tiny_params(placement, quantization="int8"), placement, roles)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((31 * i * i + 5 * i + length) % 97 for i in range(length))


def handed_over(
    model: str, kernels: str, prefill: int, decode: int, length: int
) -> tuple[int, ...]:
    """A prompt computed on `prefill` shards and decoded on `decode` shards."""
    deltas = hand_over(
        tiny_engine(runner_of(model, kernels, prefill, Role.PREFILL)),
        tiny_engine(runner_of(model, kernels, decode, Role.DECODE)),
        lambda roles: request(
            "r", prompt_of(length), roles, b"t", temperature=1.0, seed=3, max_tokens=12
        ),
        piece=7,
    )
    return tuple(token for delta in deltas for token in delta.tokens)


@pytest.mark.parametrize("model", MODELS)
def test_every_number_of_shards_gives_the_same_tokens(model: str) -> None:
    for length in (1, 61):
        wanted = handed_over(model, "cpu", 1, 1, length)
        for prefill, decode in ((2, 4), (4, 1)):
            assert handed_over(model, "cpu", prefill, decode, length) == wanted


def test_the_reference_gives_the_same_tokens_on_four_shards() -> None:
    wanted = handed_over("replicated", "cpu", 1, 1, 20)
    assert handed_over("replicated", "reference", 4, 4, 20) == wanted


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_scales_lie_with_their_outputs(kernels: str) -> None:
    params = runner_of("divided", kernels, 4, Role.DECODE)._params
    parts = {"q": 4, "k": 4, "v": 4, "gate": 4, "up": 4, "head": 4, "o": 1, "down": 1}
    for name, count in parts.items():
        matrix = params[name].matrix
        (values,) = {shard.data.nbytes for shard in matrix.values.addressable_shards}
        (scales,) = {shard.data.nbytes for shard in matrix.scales.addressable_shards}
        assert (values * 4, scales * count) == (matrix.values.nbytes, matrix.scales.nbytes), name


# ---- a checkpoint ----


def answers_of(folder: Path, kernels: str) -> dict[str, tuple[int, ...]]:
    """32 greedy tokens after each golden prompt, computed in one place and handed over."""
    traits = traits_of(json.loads((folder / "config.json").read_text()))
    placement = tiny_placement(traits, kernels)
    params = load_params(folder, placement, np.float32, MAX_MODEL_LEN, "int8")
    prefill, decode = (make_runner(params, placement, role) for role in (COLOCATED, Role.DECODE))
    found: dict[str, tuple[int, ...]] = {}
    for number, each in enumerate(json.loads((folder / "answers.json").read_text())):
        greedy = {"temperature": 0.0, "max_tokens": 32}
        prompt = tuple(each["prompt"])
        engine = tiny_engine(prefill, traits.vocab)
        engine.submit(Add(request("r", prompt, **greedy)))
        found[f"{number} colocated"] = output_of(run(engine), "r")
        deltas = hand_over(
            tiny_engine(prefill, traits.vocab),
            tiny_engine(decode, traits.vocab),
            functools.partial(request, "r", prompt, transfer_id=b"t", **greedy),
            piece=CHUNK_TOKENS,
        )
        found[f"{number} handed over"] = tuple(token for d in deltas for token in d.tokens)
    return found


@pytest.mark.parametrize("variant", ["untied_biases", "head_dim"])
def test_every_kernel_and_placement_gives_the_same_tokens(variant: str) -> None:
    found = answers_of(GOLDEN / variant, "cpu")
    for number in range(len(found) // 2):
        assert found[f"{number} colocated"] == found[f"{number} handed over"]
    assert answers_of(GOLDEN / variant, "reference") == found
    assert len({token for tokens in found.values() for token in tokens}) > 5


def test_quantized_weights_are_another_model() -> None:
    """KV is never mixed with that of the weights as they were stored."""
    folder = GOLDEN / "head_dim"
    config = EngineConfig(num_blocks=8)

    def built(**more: str) -> Any:
        return build_engine(folder, ModelConfig(str(folder), **more), config, Role.PREFILL)

    names = {built(**more).limits.fingerprint for more in ({}, {"quantization": "int8"})}
    assert len(names) == 2
    assert built(quantization="int8").limits.fingerprint in names
