"""Rotary position embeddings (Su et al., 2021): the angles, made once at load."""

from __future__ import annotations

import math

import numpy as np

from engine.models.traits import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    Temperature,
    Traits,
    YarnScaling,
)

_POSITIONS_AT_ONCE = 4096


def rope_angles(rope: Rope, positions: int) -> np.ndarray:
    """float32 [positions, rope.width]: cosines of each position's angles, then their sines.

    A table, so that a token is rotated by the same bits in every program. `positions` is the
    longest sequence, by which LongRoPE chooses its factors.
    """
    waves = inverse_frequencies(rope, positions)
    scaling = rope.scaling
    factor = scaling.attention_factor if isinstance(scaling, YarnScaling | LongRopeScaling) else 1
    half = rope.width // 2
    table = np.empty((positions, rope.width), np.float32)
    # By pieces: models of millions of positions have tables of gigabytes, in float64 several.
    for first in range(0, positions, _POSITIONS_AT_ONCE):
        piece = table[first : first + _POSITIONS_AT_ONCE]
        numbers = np.arange(first, first + len(piece), dtype=np.float32)
        wide = (numbers[:, None] * waves).astype(np.float64)
        piece[:, :half], piece[:, half:] = np.cos(wide) * factor, np.sin(wide) * factor
    return table


def stretched_length(traits: Traits, positions: int) -> int:
    """The longest sequence of a model whose config.json says that it has `positions`.

    YaRN is switched on by rope_scaling alone: Qwen2.5 and Qwen3 keep the length without it.
    """
    scalings = (rope.scaling for rope in traits.ropes)
    yarns = (
        int(s.factor * s.original_max_position) for s in scalings if isinstance(s, YarnScaling)
    )
    return max((positions, *yarns))


def has_long_factors(traits: Traits, positions: int) -> bool:
    """Whether sequences of up to `positions` take LongRoPE's long factors: KV that does not mix
    with that of short ones."""
    scalings = (rope.scaling for rope in traits.ropes)
    return any(isinstance(s, LongRopeScaling) and _is_long(s, positions) for s in scalings)


def _is_long(scaling: LongRopeScaling, positions: int) -> bool:
    return positions > scaling.original_max_position


def query_scales(temperature: Temperature, positions: int) -> np.ndarray:
    """float32 [positions]: what multiplies the queries; a table for the same reason."""
    steps = np.floor((np.arange(positions) + 1) / temperature.floor)
    return (1 + temperature.scale * np.log1p(steps)).astype(np.float32)


def inverse_frequencies(rope: Rope, positions: int) -> np.ndarray:
    """float32 [rope.width / 2], for sequences of up to `positions`."""
    exponents = np.arange(0, rope.width, 2, dtype=np.float64) / rope.width
    frequencies = rope.theta**-exponents
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case Llama3Scaling() as scaling:
            frequencies = _llama3(frequencies, scaling)
        case YarnScaling() as scaling:
            frequencies = _yarn(frequencies, rope, scaling)
        case LongRopeScaling() as scaling:
            long = _is_long(scaling, positions)
            frequencies = frequencies / (scaling.long_factors if long else scaling.short_factors)
    return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Llama 4 blends none: both factors are 1.
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else turns >= low
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(frequencies: np.ndarray, rope: Rope, scaling: YarnScaling) -> np.ndarray:
    """The same, blended over the dimensions between `beta_fast` and `beta_slow` turns."""

    def dimension(turns: float) -> float:
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return rope.width * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.width - 1)
    span = last - first or 0.001
    stretched = np.clip((np.arange(rope.width // 2) - first) / span, 0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
