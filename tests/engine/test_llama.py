"""The Llama family: traits, rotary embeddings, and transformers' own answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.events import Add
from engine.loading import load_params
from engine.models.families import traits_of
from engine.models.rope import inverse_frequencies, rope_angles
from engine.models.traits import (
    LayerKind,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Scaling,
    Traits,
    UnsupportedModel,
)
from engine.types import MAX_TOP_LOGPROBS, Role
from tests.engine.helpers import deltas_of, request, run
from tests.engine.tiny import (
    CONFIG,
    MAX_MODEL_LEN,
    changed,
    make_runner,
    tiny_engine,
    tiny_placement,
    tiny_traits,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("variant", ["untied_biases", "tied_llama3", "head_dim", "linear"])
def test_answers_are_those_of_transformers(variant: str, kernels: str) -> None:
    """32 greedy tokens, and the likeliest 20 to 1e-4; made by tests/golden/make_tiny_llama.py.

    Together the variants switch on every trait of the family.
    """
    folder = GOLDEN / variant
    traits = traits_of(json.loads((folder / "config.json").read_text()))
    placement = tiny_placement(traits, kernels)
    params = load_params(folder, placement, np.float32, MAX_MODEL_LEN)
    answers = json.loads((folder / "answers.json").read_text())
    # The programs for prompts hold one-token rows as well: half as many to compile.
    engine = tiny_engine(make_runner(params, placement, Role.PREFILL), traits.vocab)
    for number, each in enumerate(answers):
        greedy = {"temperature": 0.0, "max_tokens": 32, "top_logprobs": MAX_TOP_LOGPROBS}
        engine.submit(Add(request(str(number), tuple(each["prompt"]), **greedy)))
    events = run(engine)
    for number, each in enumerate(answers):
        deltas = deltas_of(events, str(number))
        assert [token for d in deltas for token in d.tokens] == each["output"]
        assert deltas[0].logprobs is not None
        (first,) = deltas[0].logprobs
        logits = np.array(each["logits"])
        order = np.argsort(-logits)[:MAX_TOP_LOGPROBS]
        assert list(first.top_ids) == order.tolist()
        wanted = logits[order] - np.log(np.exp(logits).sum())
        np.testing.assert_allclose(first.top_logprobs, wanted, rtol=1e-4, atol=1e-5)


# ---- rotary embeddings ----


def test_plain_and_linear_frequencies() -> None:
    wanted = [10000.0 ** (-2 * i / 8) for i in range(4)]
    (plain,) = tiny_traits(head_dim=8).ropes
    np.testing.assert_allclose(inverse_frequencies(plain, 9), wanted, rtol=1e-6)
    (linear,) = tiny_traits(head_dim=8, rope_scaling={"type": "linear", "factor": 4}).ropes
    np.testing.assert_allclose(inverse_frequencies(linear, 9), np.array(wanted) / 4, rtol=1e-6)
    assert inverse_frequencies(linear, 9).dtype == np.float32


def test_llama3_frequencies() -> None:
    """Slow, blended and fast waves, one by one as the Llama 3.1 release computes them."""
    (rope,) = tiny_traits(head_dim=16, rope_scaling=LLAMA3).ropes
    kinds = set()
    for i, found in enumerate(inverse_frequencies(rope, 9)):
        plain = 10000.0 ** (-2 * i / 16)
        wavelength = 2 * math.pi / plain
        if wavelength < 32 / 4.0:
            kinds.add("fast")
            wanted = plain
        elif wavelength > 32 / 1.0:
            kinds.add("slow")
            wanted = plain / 8.0
        else:
            kinds.add("blended")
            smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
            wanted = (1 - smooth) * plain / 8.0 + smooth * plain
        assert found == pytest.approx(wanted, rel=1e-6)
    assert kinds == {"fast", "blended", "slow"}


def test_llama3_frequencies_without_a_blend() -> None:
    """Llama 4's: a wave of at most the original length is kept, a longer one stretched."""
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    (rope,) = tiny_traits(head_dim=16, rope_scaling=LLAMA3 | {"high_freq_factor": 1.0}).ropes
    wanted = np.where(2 * math.pi / plain > 32, plain / 8.0, plain)
    np.testing.assert_allclose(inverse_frequencies(rope, 9), wanted, rtol=1e-6)


def test_the_table_of_angles() -> None:
    (rope,) = tiny_traits(head_dim=8).ropes
    table = rope_angles(rope, 50)
    angles = np.arange(50)[:, None] * inverse_frequencies(rope, 50).astype(np.float64)
    assert table.shape == (50, 8)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table[:, :4], np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(table[:, 4:], np.sin(angles), atol=1e-5)


# ---- config.json ----


def test_traits_of_a_minimal_config() -> None:
    minimal = changed(
        CONFIG,
        num_key_value_heads=None,
        rope_theta=None,
        tie_word_embeddings=None,
        rms_norm_eps=None,
    )
    assert traits_of(minimal) == Traits(
        hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=48, vocab=97, norm_eps=1e-6,
        kinds=(LayerKind(), LayerKind()), ropes=(Rope(10000.0, 16),), score_scale=0.25, tied=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}},
            5.0,
            LinearScaling(2.0),
        ),
        ({"rope_theta": 5.0, "rope_scaling": LLAMA3}, 5.0, Llama3Scaling(8.0, 1.0, 4.0, 32)),
        (
            {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 9.0}},
            9.0,
            Llama3Scaling(8.0, 1.0, 4.0, 32),
        ),
    ],
)
def test_both_spellings_of_rope(
    fields: dict[str, Any], theta: float, scaling: Scaling | None
) -> None:
    assert traits_of(changed(CONFIG, **fields)).ropes == (Rope(theta, 16, scaling),)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": None}, "model_type=None is not supported"),
        (
            {"model_type": "gpt9"},
            r"model_type='gpt9' is not supported \(supported: gemma, .*llama, .*smollm3\)",
        ),
        ({"model_type": ["llama"]}, "model_type=.* is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"hidden_size": None}, "the field 'hidden_size' is missing"),
        ({"num_hidden_layers": None}, "the field 'num_hidden_layers' is missing"),
        ({"num_attention_heads": None}, "the field 'num_attention_heads' is missing"),
        ({"intermediate_size": None}, "the field 'intermediate_size' is missing"),
        ({"vocab_size": None}, "the field 'vocab_size' is missing"),
        ({"hidden_size": "32"}, "hidden_size='32' is not a positive integer"),
        ({"hidden_size": 32.0}, "hidden_size=32.0 is not a positive integer"),
        ({"vocab_size": 0}, "vocab_size=0 is not a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True is not a positive integer"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps='tiny' is not a positive number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1 is not a positive number"),
        ({"rope_theta": "high"}, "rope_theta='high' is not a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings=1 is not true or false"),
        ({"attention_bias": "no"}, "attention_bias='no' is not true or false"),
        ({"mlp_bias": 0.5}, "mlp_bias=0.5 is not true or false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"hidden_size": 33}, "num_attention_heads=4 does not divide hidden_size=33"),
        ({"hidden_size": 36}, "head_dim=9 is odd"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"rope_scaling": [1]}, "rope_scaling is not an object"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type='dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "the field 'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0 is not a positive number"),
        (
            {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}},
            "the field 'low_freq_factor' is missing",
        ),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 3.5}},
            "original_max_position_embeddings=3.5 is not a positive integer",
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}},
            "high_freq_factor=0.5 is below low_freq_factor=1.0",
        ),
    ],
)
def test_a_config_that_cannot_be_computed_names_its_field(
    changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        traits_of(changed(CONFIG, **changes))
