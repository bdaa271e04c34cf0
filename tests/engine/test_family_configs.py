"""From config.json to traits, family by family: defaults, patterns of layers, and refusals."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from engine.models.families import traits_of
from engine.models.layers import segments_of
from engine.models.rope import (
    has_long_factors,
    inverse_frequencies,
    query_scales,
    rope_angles,
    stretched_length,
)
from engine.models.traits import (
    LayerKind,
    LinearScaling,
    LongRopeScaling,
    Rope,
    Temperature,
    UnsupportedModel,
    YarnScaling,
)
from tests.engine.tiny import changed
from tests.golden.family_models import VARIANTS

# ---- patterns of layers ----


def kinds_of(pattern: str) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(window=ord(letter)) for letter in pattern)


@pytest.mark.parametrize(
    ("pattern", "units"),
    [
        ("a" * 80, [("a", 80)]),
        ("ab" * 21, [("ab", 21)]),
        ("aaaaab" * 4 + "aa", [("aaaaab", 4), ("a", 2)]),
        ("a" * 28 + "b" * 4, [("a", 28), ("b", 4)]),
        ("aab", [("a", 2), ("b", 1)]),
        ("a", [("a", 1)]),
    ],
)
def test_layers_are_scanned_over_the_unit_that_repeats(
    pattern: str, units: list[tuple[str, int]]
) -> None:
    segments = segments_of(kinds_of(pattern))
    assert [(s.kinds, s.repeats) for s in segments] == [(kinds_of(u), n) for u, n in units]
    first = 0
    for segment in segments:
        assert segment.first == first
        first += len(segment.kinds) * segment.repeats
    assert first == len(pattern)


def windows_of(**config: Any) -> list[int | None]:
    return [kind.window for kind in traits_of(config).kinds]


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 1024,
}


def test_windows_follow_the_pattern_of_each_family() -> None:
    four = SMALL | {"num_hidden_layers": 4, "sliding_window": 9}
    assert windows_of(model_type="mistral", **four) == [9] * 4
    assert windows_of(model_type="mistral", **changed(four, sliding_window=None)) == [4096] * 4
    assert windows_of(model_type="mistral", **(four | {"sliding_window": None})) == [None] * 4
    assert windows_of(model_type="gemma2", **four) == [9, None, 9, None]
    gemma3 = four | {"model_type": "gemma3_text", "sliding_window_pattern": 3}
    assert windows_of(**gemma3) == [9, 9, None, 9]
    assert [kind.rope for kind in traits_of(gemma3).kinds] == [1, 1, 0, 1]
    listed = ["full_attention", "sliding_attention"] * 2
    assert windows_of(**gemma3, layer_types=listed) == [None, 9, None, 9]
    assert windows_of(model_type="qwen2", **four) == [None] * 4
    used = four | {"use_sliding_window": True, "max_window_layers": 0}
    assert windows_of(model_type="qwen2", **used) == [9] * 4
    assert windows_of(model_type="qwen3", **(used | {"max_window_layers": 3})) == [None] * 3 + [9]


def test_layers_without_positions() -> None:
    config = SMALL | {"num_hidden_layers": 5, "model_type": "smollm3"}
    assert [kind.rope for kind in traits_of(config).kinds] == [0, 0, 0, None, 0]
    listed = config | {"no_rope_layers": [1, 0, 0, 1, 1]}
    assert [kind.rope for kind in traits_of(listed).kinds] == [0, None, None, 0, 0]


@pytest.mark.parametrize(
    ("said", "tuned"), [({}, True), (True, True), (4, True), (False, False), (None, False)]
)
def test_whether_temperatures_are_tuned(said: Any, tuned: bool) -> None:
    config = VARIANTS["llama4"] | ({} if said == {} else {"attn_temperature_tuning": said})
    kinds = traits_of(config).kinds
    assert [kind.temperature is not None for kind in kinds] == [False, False, False, tuned]


def test_which_layers_have_experts() -> None:
    moe = VARIANTS["qwen3_moe"]
    assert [kind.experts for kind in traits_of(moe).kinds] == [True, False, True]
    stepped = moe | {"mlp_only_layers": [], "decoder_sparse_step": 2}
    assert [kind.experts for kind in traits_of(stepped).kinds] == [False, True, False]
    saved_again = changed(moe, num_experts=None) | {"num_local_experts": moe["num_experts"]}
    assert traits_of(saved_again) == traits_of(moe)
    listed = VARIANTS["llama4"] | {"moe_layers": [0, 3]}
    assert [kind.experts for kind in traits_of(listed).kinds] == [True, False, False, True]


def test_the_text_part_of_a_multimodal_model() -> None:
    """What Gemma 3's releases leave out is as in the 4B."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    traits = traits_of({"model_type": "gemma3", "text_config": text})
    assert (traits.vocab, traits.heads, traits.kv_heads, traits.head_dim) == (262208, 8, 4, 256)
    assert traits.ropes == (Rope(1e6, 256, LinearScaling(8.0)), Rope(1e4, 256))
    assert traits.score_scale == 256**-0.5


@pytest.mark.parametrize(
    ("outer", "text", "tied"),
    [(True, False, True), (False, True, False), (None, True, True), (None, False, False)],
)
def test_the_model_around_the_text_part_says_whether_its_head_is_tied(
    outer: bool | None, text: bool, tied: bool
) -> None:
    """What transformers 5 saves: Mistral3Config ties, the MistralConfig within says false."""
    part = VARIANTS["mistral"] | {"tie_word_embeddings": text}
    config = {"model_type": "mistral3", "text_config": part, "tie_word_embeddings": outer}
    assert traits_of(config).tied is tied


def test_the_text_part_says_what_decoder_it_is() -> None:
    mistral = {"model_type": "mistral3", "text_config": VARIANTS["mistral"]}
    assert traits_of(mistral) == traits_of(VARIANTS["mistral"])
    other = VARIANTS["mistral"] | {"model_type": "ministral3"}
    with pytest.raises(UnsupportedModel, match=r"text_config\.model_type='ministral3' is not"):
        traits_of({"model_type": "mistral3", "text_config": other})


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_all_of_a_rope_in_one_object(name: str) -> None:
    said = {"type": "linear", "factor": 2.0, "rope_theta": 77.0, "partial_rotary_factor": 0.5}
    config = changed(VARIANTS["mistral"], rope_theta=None) | {"head_dim": 16, name: said}
    assert traits_of(config).ropes == (Rope(77.0, 8, LinearScaling(2.0)),)


def test_the_newer_spelling_of_ropes_by_layer() -> None:
    config = changed(VARIANTS["gemma3"], rope_theta=None, rope_scaling=None) | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        }
    }
    assert traits_of(config) == traits_of(VARIANTS["gemma3"])


# ---- rotary embeddings ----


def test_longrope_takes_its_factors_by_the_longest_sequence() -> None:
    rope = Rope(1e4, 4, LongRopeScaling((1.0, 2.0), (3.0, 8.0), 64, attention_factor=1.5))
    np.testing.assert_allclose(inverse_frequencies(rope, 64), [1.0, 0.01 / 2])
    np.testing.assert_allclose(inverse_frequencies(rope, 65), [1 / 3, 0.01 / 8])
    assert rope_angles(rope, 65)[0].tolist() == [1.5, 1.5, 0.0, 0.0]
    traits = traits_of(VARIANTS["phi3_longrope"])
    assert [has_long_factors(traits, positions) for positions in (64, 65)] == [False, True]
    assert not has_long_factors(traits_of(VARIANTS["phi3"]), 10**6)


def test_a_table_of_many_positions_takes_little_beside_itself() -> None:
    rope = Rope(1e4, 64, LinearScaling(2.0))
    tracemalloc.start()
    table = rope_angles(rope, 40_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * table.nbytes
    last = 39_999 * inverse_frequencies(rope, 1).astype(np.float64)
    np.testing.assert_allclose(table[-1], [*np.cos(last), *np.sin(last)], atol=0.01)


def test_longrope_grows_by_the_length_of_the_model() -> None:
    (rope,) = traits_of(VARIANTS["phi3_longrope"]).ropes
    assert isinstance(rope.scaling, LongRopeScaling)
    assert rope.scaling.attention_factor == math.sqrt(1 + math.log(1024 / 64) / math.log(64))
    assert rope.scaling.original_max_position == 64


def test_phi3_was_trained_for_4096_tokens_where_nothing_is_said() -> None:
    longrope = changed(VARIANTS["phi3_longrope"], original_max_position_embeddings=None)
    (rope,) = traits_of(longrope | {"max_position_embeddings": 131072}).ropes
    assert isinstance(rope.scaling, LongRopeScaling)
    assert rope.scaling.original_max_position == 4096
    assert rope.scaling.attention_factor == math.sqrt(1 + math.log(32) / math.log(4096))


def test_yarn_keeps_fast_waves_and_stretches_slow_ones() -> None:
    rope = Rope(100.0, 32, YarnScaling(4.0, 64, 1.0, beta_fast=4.0, beta_slow=1.0, truncate=True))
    plain = inverse_frequencies(Rope(100.0, 32), 9)
    kept = inverse_frequencies(rope, 9) / plain
    assert kept[0] == 1
    np.testing.assert_allclose(kept[-1], 0.25)
    assert (np.diff(kept) <= 0).all()


def test_yarn_makes_sequences_longer_than_config_json_says() -> None:
    yarn = VARIANTS["qwen2_yarn"]
    (rope,) = traits_of(yarn).ropes
    assert isinstance(rope.scaling, YarnScaling)
    assert (rope.scaling.factor, rope.scaling.original_max_position) == (4.0, 64)
    assert [stretched_length(traits_of(yarn), said) for said in (64, 1024)] == [256, 1024]
    assert stretched_length(traits_of(VARIANTS["qwen2"]), 64) == 64


def test_queries_grow_in_steps_of_the_floor() -> None:
    scales = query_scales(Temperature(floor=8, scale=0.1), 24)
    assert scales.dtype == np.float32
    assert (scales[:7] == 1).all()
    np.testing.assert_allclose(scales[7:15], 1 + 0.1 * math.log(2), rtol=1e-6)
    np.testing.assert_allclose(scales[23], 1 + 0.1 * math.log(4), rtol=1e-6)


# ---- refusals ----


@pytest.mark.parametrize(
    ("variant", "changes", "complaint"),
    [
        (
            "gemma2",
            {"layer_types": ["chunked_attention"] * 4},
            "layer_types has 'chunked_attention'",
        ),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types is not a list of 4 items"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 of 4 experts"),
        ("qwen3_moe", {"num_experts": None}, "the field 'num_experts' is missing"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is not a list"),
        ("llama4", {"attention_chunk_size": -1}, "attention_chunk_size=-1 is not a positive"),
        ("llama4", {"moe_layers": 3}, "moe_layers is not a list"),
        ("phi4_mini", {"partial_rotary_factor": 0.7}, "partial_rotary_factor=0.7 of head_dim=16"),
        ("phi4_mini", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 of head_dim=16"),
        (
            "phi3_longrope",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "short_factor is not a list of 8 numbers",
        ),
        (
            "phi3_longrope",
            {"rope_scaling": {"type": "longrope", "short_factor": ["a"] * 8}},
            "short_factor='a' is not a positive number",
        ),
        ("qwen2_yarn", {"rope_scaling": {"type": "yarn"}}, "the field 'factor' is missing"),
        ("mistral", {"rope_theta": math.nan}, "rope_theta=nan is not a positive number"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 is not a positive integer"),
    ],
)
def test_a_config_that_cannot_be_computed_names_its_field(
    variant: str, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        traits_of(changed(VARIANTS[variant], **changes))
