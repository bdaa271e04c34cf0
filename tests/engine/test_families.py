"""Every model family answers as transformers does; see tests/golden/make_families.py."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.batches import pack_batch
from engine.events import Add
from engine.jax_runner import JaxRunner
from engine.kernels.quantized import quantize
from engine.models.families import FAMILIES, traits_of
from engine.models.traits import Rope, Traits
from engine.models.weights import Kind, declare_weights, stored_parts
from engine.placing import Placement, ReadTensor, place_params
from engine.plan import BatchRow
from engine.types import AttemptId, Role, SequenceId
from tests.engine.helpers import deltas_of, hand_over, output_of, request, run, untimed
from tests.engine.tiny import CHUNK_TOKENS, make_runner, tiny_engine, tiny_placement
from tests.golden.family_models import (
    MAX_MODEL_LEN,
    NEW_TOKENS,
    VARIANTS,
    VOCAB,
    stored_tensors,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "families"
LIMITS = {"max_model_len": MAX_MODEL_LEN, "max_batch_tokens": 48}
"""A long prompt is computed in two chunks."""
TOLERANCE = 1e-4
"""Of the largest logit."""

Answers = list[dict[str, Any]]


@functools.cache
def golden(variant: str) -> tuple[int, Answers]:
    """(seed of the weights, answers)."""
    content = json.loads((GOLDEN / f"{variant}.json").read_text())
    return content["seed"], content["answers"]


def reader_of(variant: str, traits: Traits) -> ReadTensor:
    """Reads the variant's checkpoint as one of `traits`."""
    tensors = stored_tensors(VARIANTS[variant], golden(variant)[0])
    parts = stored_parts(traits)
    return lambda name: parts[name].take(lambda tensor, index: tensors[tensor][index])


def runner_of(
    variant: str, kernels: str, shards: int, role: Role, traits: Traits | None = None
) -> JaxRunner:
    """The variant's checkpoint, read as that of its own traits or of others."""
    traits = traits or traits_of(VARIANTS[variant])
    return runner_on(tiny_placement(traits, kernels, shards), reader_of(variant, traits), role)


def runner_on(
    placement: Placement, read: ReadTensor, role: Role, quantization: str = "none"
) -> JaxRunner:
    params = place_params(placement, read, np.float32, MAX_MODEL_LEN, quantization)
    return make_runner(params, placement, role, prefill_len=152, max_model_len=MAX_MODEL_LEN)


cached_runner = functools.cache(runner_of)


def logits_of(runner: JaxRunner, prompt: list[int]) -> np.ndarray:
    """float32 [vocab], after a prompt that is computed at once."""
    shape = runner._shapes[-1]
    blocks = np.arange(-(-len(prompt) // runner._block_size), dtype=np.int32)
    row = BatchRow(SequenceId(AttemptId("r", 0), 0), tuple(prompt), 0, blocks, 0, None)
    last = runner._last_tokens
    program = runner._programs.forward(shape, runner._params, runner._pools, last)
    result, runner._pools, _ = program(
        runner._params, runner._pools, pack_batch((row,), shape), last
    )
    return np.asarray(result)[0]


def error_of(runner: JaxRunner, answers: Answers) -> float:
    """The largest difference of a logit from transformers', by the largest logit of its row."""
    errors = []
    for each in answers:
        wanted = np.array(each["logits"])
        found = logits_of(runner, each["prompt"])
        errors.append(np.abs(found - wanted).max() / np.abs(wanted).max())
    return float(max(errors))


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NEW_TOKENS}


def check_colocated(variant: str, kernels: str, shards: int) -> None:
    """Logits, and greedy tokens of all prompts in one engine."""
    answers = golden(variant)[1]
    # The programs for prompts hold one-token rows as well: half as many to compile.
    runner = cached_runner(variant, kernels, shards, Role.PREFILL)
    assert error_of(runner, answers) <= TOLERANCE
    engine = tiny_engine(runner, VOCAB, **LIMITS)
    for number, each in enumerate(answers):
        engine.submit(Add(request(str(number), tuple(each["prompt"]), **GREEDY)))
    events = run(engine)
    for number, each in enumerate(answers):
        assert list(output_of(events, str(number))) == each["output"]


def check_handed_over(variant: str, kernels: str, prefill: int, decode: int) -> None:
    """The same tokens where a prompt is computed on `prefill` shards, decoded on `decode`."""
    for each in golden(variant)[1]:
        deltas = hand_over(
            tiny_engine(cached_runner(variant, kernels, prefill, Role.PREFILL), VOCAB, **LIMITS),
            tiny_engine(cached_runner(variant, kernels, decode, Role.DECODE), VOCAB, **LIMITS),
            functools.partial(request, "r", tuple(each["prompt"]), transfer_id=b"t", **GREEDY),
            piece=CHUNK_TOKENS,
        )
        assert [token for delta in deltas for token in delta.tokens] == each["output"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_those_of_transformers(variant: str) -> None:
    check_colocated(variant, "cpu", 1)


@pytest.mark.parametrize(
    ("variant", "kernels", "shards"),
    [("gemma3", "cpu", 2), ("llama4", "cpu", 2), ("qwen3_moe", "reference", 2)],
)
def test_shards_and_hand_overs_change_nothing(variant: str, kernels: str, shards: int) -> None:
    check_colocated(variant, kernels, shards)
    check_handed_over(variant, kernels, shards, 1)


@pytest.mark.parametrize("variant", ["gemma3", "llama4", "qwen3_moe"])
def test_neighbours_in_a_batch_change_no_bit(variant: str) -> None:
    runner = cached_runner(variant, "cpu", 1, Role.PREFILL)
    prompts = [tuple(each["prompt"]) for each in golden(variant)[1]]

    def answers(*numbers: int) -> list[Any]:
        engine = tiny_engine(runner, VOCAB, **LIMITS)
        for number in numbers:
            sampling = GREEDY | {"max_tokens": 8, "top_logprobs": 5}
            engine.submit(Add(request(str(number), prompts[number], **sampling)))
        events = run(engine)
        return [untimed(deltas_of(events, str(number))) for number in numbers]

    assert answers(0, 1) == answers(0) + answers(1)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("variant", ["gemma2", "llama4", "phi3", "qwen3_moe"])
def test_int8_weights_are_the_ones_they_stand_for(variant: str, shards: int) -> None:
    """Of joined matrices, of experts stored in one tensor and apart, of an embedding that is tied
    and scaled."""
    traits = traits_of(VARIANTS[variant])
    read = reader_of(variant, traits)
    rounded = {
        name
        for weight in declare_weights(traits).values()
        if weight.kind in (Kind.LINEAR, Kind.EMBEDDING, Kind.HEAD)
        for name in weight.source_names()
    }

    def read_rounded(name: str) -> np.ndarray:
        tensor = read(name)
        if name not in rounded:
            return tensor
        as_int8 = quantize(tensor, tensor.dtype)
        return as_int8.values * as_int8.scales[:, None]

    alone, placement = (tiny_placement(traits, "cpu", count) for count in (1, shards))
    whole = runner_on(alone, read_rounded, Role.PREFILL)
    quantized = runner_on(placement, read, Role.PREFILL, "int8")
    for each in golden(variant)[1]:
        wanted = logits_of(whole, each["prompt"])
        found = logits_of(quantized, each["prompt"])
        assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.mark.full
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_on_every_placement(variant: str, shards: int, kernels: str) -> None:
    check_colocated(variant, kernels, shards)
    check_handed_over(variant, kernels, shards, shards)


def test_every_family_has_a_golden_variant() -> None:
    traits = {FAMILIES[str(config["model_type"])].traits for config in VARIANTS.values()}
    assert traits == {family.traits for family in FAMILIES.values()}


# ---- no trait is idle ----

Change = Callable[[Traits], Traits]


def traits(**changes: Any) -> Change:
    return lambda t: dataclasses.replace(t, **changes)


def kinds(**changes: Any) -> Change:
    return lambda t: dataclasses.replace(
        t, kinds=tuple(dataclasses.replace(kind, **changes) for kind in t.kinds)
    )


def windows(shift: int) -> Change:
    """The windows' edges moved."""
    return lambda t: dataclasses.replace(
        t,
        kinds=tuple(
            dataclasses.replace(kind, window=kind.window and kind.window + shift)
            for kind in t.kinds
        ),
    )


def reversed_kinds(t: Traits) -> Traits:
    return dataclasses.replace(t, kinds=t.kinds[::-1])


def experts(**changes: Any) -> Change:
    return lambda t: dataclasses.replace(
        t, experts=dataclasses.replace(t.experts, **changes) if t.experts else None
    )


def ropes(change: Callable[[Rope], Rope]) -> Change:
    return lambda t: dataclasses.replace(t, ropes=tuple(map(change, t.ropes)))


def rope(**changes: Any) -> Change:
    return ropes(lambda r: dataclasses.replace(r, **changes))


def scaling(**changes: Any) -> Change:
    return ropes(
        lambda r: dataclasses.replace(
            r, scaling=dataclasses.replace(r.scaling, **changes) if r.scaling else None
        )
    )


def stored(**changes: Any) -> Change:
    return lambda t: dataclasses.replace(t, stored=dataclasses.replace(t.stored, **changes))


def short_factors(r: Rope) -> Rope:
    assert r.scaling is not None
    return dataclasses.replace(
        r, scaling=dataclasses.replace(r.scaling, long_factors=r.scaling.short_factors)
    )


SWITCHED_OFF: list[tuple[str, str, Change]] = [
    ("gemma", "embedding scale", traits(embedding_scale=None)),
    ("gemma", "norm offset", stored(norm_offset=0.0)),
    ("gemma", "activation", traits(activation="silu")),
    ("gemma2", "post norms", traits(post_norms=False)),
    ("gemma2", "attention soft cap", traits(attention_soft_cap=None)),
    ("gemma2", "logit soft cap", traits(logit_soft_cap=None)),
    ("gemma2", "score scale", traits(score_scale=0.25)),
    ("gemma2", "windows", kinds(window=None)),
    ("gemma2", "window's edge", windows(1)),
    ("gemma2", "alternation", reversed_kinds),
    ("gemma3", "head norms", kinds(head_norm=False)),
    ("gemma3", "ropes by layer", kinds(rope=0)),
    ("gemma3", "linear scaling", rope(scaling=None)),
    ("gemma3", "windows", kinds(window=None)),
    ("llama3", "llama3 scaling", rope(scaling=None)),
    ("llama4", "chunks", kinds(chunk=None)),
    ("llama4", "temperature", kinds(temperature=None)),
    ("llama4", "head norms", kinds(head_norm=False)),
    ("llama4", "layers without positions", kinds(rope=0)),
    ("llama4", "interleaved pairs", stored(interleaved=False)),
    ("llama4", "weighed inputs", experts(scale_input=False)),
    ("llama4", "sigmoid", experts(scores="softmax")),
    ("llama4", "shared expert", experts(shared_ffn=None)),
    ("llama4_interleaved", "all of the chosen", experts(top_k=1)),
    ("mistral", "window", kinds(window=None)),
    ("mistral", "window's edge", windows(-1)),
    ("mixtral", "normed scores", experts(normed=False)),
    ("mixtral", "all of the chosen", experts(top_k=1)),
    ("phi3", "window", kinds(window=None)),
    ("phi3_longrope", "longrope", rope(scaling=None)),
    ("phi3_longrope", "long factors", ropes(short_factors)),
    ("phi3_longrope", "attention factor", scaling(attention_factor=1.0)),
    ("phi4_mini", "partial rotation", rope(width=16, scaling=None)),
    ("phi4_mini", "longrope", rope(scaling=None)),
    ("qwen2", "biases", traits(qkv_bias=False)),
    ("qwen2_yarn", "yarn", rope(scaling=None)),
    ("qwen2_yarn", "attention factor", scaling(attention_factor=1.0)),
    ("qwen2_yarn", "truncation", scaling(truncate=False)),
    ("qwen2_yarn", "beta_fast", scaling(beta_fast=32.0)),
    ("qwen2_yarn", "windows of later layers", reversed_kinds),
    ("qwen3", "head norms", kinds(head_norm=False)),
    ("qwen3_moe", "scores as they are", experts(normed=True)),
    ("smollm3", "layers without positions", kinds(rope=0)),
]


@pytest.mark.parametrize(
    ("variant", "change"),
    [(variant, change) for variant, _, change in SWITCHED_OFF],
    ids=[f"{variant}: {what}" for variant, what, _ in SWITCHED_OFF],
)
def test_a_trait_that_is_switched_off_is_noticed(variant: str, change: Change) -> None:
    answers = golden(variant)[1]
    changed = change(traits_of(VARIANTS[variant]))
    runner = runner_of(variant, "cpu", 1, Role.PREFILL, changed)
    assert error_of(runner, answers) > 10 * TOLERANCE
