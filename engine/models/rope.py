"""Rotary position embeddings (Su et al., 2021): the angles, made once at load."""

from __future__ import annotations

import math

import numpy as np

from engine.models.traits import Llama3Scaling, Traits


def rope_angles(traits: Traits, positions: int) -> np.ndarray:
    """float32 [positions, head_dim]: cosines of each position's angles, then their sines.

    A table, so that a token is rotated by the same bits in every program.
    """
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(traits)
    wide = angles.astype(np.float64)
    return np.concatenate([np.cos(wide), np.sin(wide)], axis=1).astype(np.float32)


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
