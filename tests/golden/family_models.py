"""Tiny models of every family: configurations as their releases have them, weights by seed.

Nothing is stored: the script that asks transformers and the tests that ask the engine draw the
same tensors, under the names and in the shapes of a checkpoint.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from engine.models.families import traits_of
from engine.models.traits import Traits
from engine.models.weights import stored_parts

VOCAB = 64
MAX_MODEL_LEN = 144
"""Beyond every window, chunk and original length below."""
PROMPT_LENGTHS = (3, 76)
NEW_TOKENS = 64

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0],
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_VARIANTS: dict[str, dict[str, Any]] = {
    "gemma": {
        "model_type": "gemma",
        "hidden_size": 32,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-6,
    },
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    # Two units of three layers, and two layers more.
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "sliding_window_pattern": 3,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "llama3": {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama4": {
        "model_type": "llama4_text",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 16,
        "no_rope_layers": [],
        "floor_scale": 8,
        "attn_scale": 0.5,
        "rope_theta": 500000.0,
    },
    # Experts on every other layer, two for each token.
    "llama4_interleaved": {
        "model_type": "llama4_text",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {
        "model_type": "mistral",
        "hidden_size": 32,
        "head_dim": 24,
        "sliding_window": 12,
        "rope_theta": 10000.0,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "rope_theta": 1000000.0,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 12, "rope_theta": 10000.0},
    "phi3_longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "rope_scaling": _LONGROPE,
    },
    "phi4_mini": {
        "model_type": "phi3",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 256,
        "rope_scaling": {
            name: value[:6] if isinstance(value, list) else value
            for name, value in _LONGROPE.items()
        },
    },
    "qwen2": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
    },
    "qwen2_yarn": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 1,
        "rope_theta": 100.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 4.0,
        },
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 32,
        "head_dim": 24,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        **_EXPERTS,
    },
    "smollm3": {
        "model_type": "smollm3",
        "num_hidden_layers": 5,
        "no_rope_layer_interval": 4,
        "rope_theta": 2000000.0,
    },
}

VARIANTS = {name: _BASE | changes for name, changes in _VARIANTS.items()}
"""Name → config.json."""


def stored_tensors(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """float32 tensors of a checkpoint, wide enough for varied answers."""
    traits = traits_of(config)
    shapes = {part.tensor: part.shape for part in stored_parts(traits).values()}
    return {name: _drawn(name, shape, traits, seed) for name, shape in shapes.items()}


def _drawn(name: str, shape: tuple[int, ...], traits: Traits, seed: int) -> np.ndarray:
    # RandomState's numbers are promised never to change.
    noise = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    values = noise.standard_normal(shape)
    if "norm" in name:
        values = 1 - traits.stored.norm_offset + 0.2 * values
    elif name.endswith("bias"):
        values *= 0.5
    else:
        inputs = shape[1] if len(shape) == 3 else shape[-1]
        values *= 1.4 / inputs**0.5
        if traits.embedding_scale and "embed" in name:
            values /= traits.embedding_scale  # or a token would be its own likeliest successor
    return values.astype(np.float32)


def prompt_of(length: int) -> list[int]:
    """A prompt of so many tokens."""
    return [(5 * i * i + 11 * i + length) % VOCAB for i in range(length)]
