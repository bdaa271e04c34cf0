"""Rotary position embeddings (Su et al., 2021), in Hugging Face's half-split order."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.models.traits import Llama3Scaling, Traits


def inverse_frequencies(traits: Traits) -> np.ndarray:
    """float32 [head_dim / 2]."""
    exponents = np.arange(0, traits.head_dim, 2, dtype=np.float64) / traits.head_dim
    frequencies = traits.rope_theta**-exponents
    scaling = traits.rope_scaling
    if isinstance(scaling, Llama3Scaling):
        frequencies = _llama3(frequencies, scaling)
    elif scaling is not None:
        frequencies = frequencies / scaling
    return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rotate(values: Array, cos: Array, sin: Array) -> Array:
    """Rotate `values` [n, heads, head_dim] by angles whose cos and sin are [n, head_dim / 2]."""
    first, second = jnp.split(values.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(values.dtype)
