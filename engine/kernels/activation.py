"""The activations of a gated MLP. No jax: configurations name them too."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
"""x * sigmoid(x), or GELU by its tanh formula (`gelu_pytorch_tanh`)."""
