"""The model families: each one a function from config.json to traits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.traits import Fields, Traits, UnsupportedModel, llama


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    Attributes:
        traits: config.json → traits.
        models: releases of it, for people.
        features: what its decoder has beyond Llama's, for people.
    """

    traits: Callable[[Fields], Traits]
    models: str
    features: str = ""


FAMILIES: dict[str, Family] = {
    "llama": Family(
        llama,
        "Llama 2, 3, 3.1, 3.2, 3.3, Llama Guard 3, SmolLM, SmolLM2",
        "rope: linear, llama3; biases",
    ),
}
"""model_type → its family."""


def traits_of(config: Mapping[str, Any]) -> Traits:
    """The traits of a `config.json`.

    Raises:
        UnsupportedModel: unknown model_type, or a field that is missing, wrong or asks for
            something not computed here; the message names it.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModel(
            f"config.json: model_type={model_type!r} is not supported "
            f"(supported: {', '.join(sorted(FAMILIES))})"
        )
    if config.get("quantization_config"):
        raise UnsupportedModel("config.json: quantization_config is not supported yet")
    return family.traits(Fields(config))
