"""The model families: each one a function from config.json to traits, and a table of names.

To add one, write the function beside those of its kind and list it in FAMILIES; see
docs/adding-a-model.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.families.gemma import gemma, gemma2, gemma3
from engine.models.families.llama import llama, smollm3
from engine.models.families.llama4 import llama4
from engine.models.families.mistral import mistral, mixtral
from engine.models.families.phi3 import phi3
from engine.models.families.qwen import qwen2, qwen3, qwen3_moe
from engine.models.fields import Fields
from engine.models.traits import Traits, UnsupportedModel


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


_GEMMA3 = Family(
    gemma3,
    "Gemma 3 1B to 27B (text)",
    "q/k norms, norms after each block, windows on five of six layers with a rope of their own",
)
_LLAMA4 = Family(
    llama4,
    "Llama 4 Scout and Maverick (text)",
    "routed and shared experts, chunked attention, layers without positions, temperature tuning, "
    "q/k norms without weights",
)

FAMILIES: dict[str, Family] = {
    "gemma": Family(gemma, "Gemma 2B, 7B", "gated GELU, scaled embeddings, norm weights plus 1"),
    "gemma2": Family(
        gemma2,
        "Gemma 2 2B, 9B, 27B",
        "norms after each block, soft caps, windows on every other layer",
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "llama": Family(
        llama,
        "Llama 2, 3, 3.1, 3.2, 3.3, Llama Guard 3, SmolLM, SmolLM2",
        "rope: linear, llama3, yarn; biases",
    ),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mistral": Family(mistral, "Mistral 7B, Nemo 12B, Small 22B, 24B", "sliding window"),
    "mistral3": Family(mistral, "Mistral Small 3.1, 3.2 (text)", "sliding window"),
    "mixtral": Family(mixtral, "Mixtral 8x7B, 8x22B", "routed experts"),
    "phi3": Family(
        phi3,
        "Phi-3 mini and medium, Phi-4, Phi-4 reasoning, Phi-4-mini",
        "longrope, partial rotary embeddings, sliding window, joined q/k/v and gate/up",
    ),
    "qwen2": Family(qwen2, "Qwen2 and Qwen2.5 0.5B to 72B", "q/k/v biases, windows, yarn"),
    "qwen3": Family(qwen3, "Qwen3 0.6B to 32B", "q/k norms"),
    "qwen3_moe": Family(qwen3_moe, "Qwen3 30B-A3B, 235B-A22B", "q/k norms, routed experts"),
    "smollm3": Family(smollm3, "SmolLM3 3B", "layers without positions"),
}
"""model_type → its family."""


def traits_of(config: Mapping[str, Any]) -> Traits:
    """The traits of a `config.json`; of a multimodal one, those of its text model.

    Raises:
        UnsupportedModel: unknown model_type, or a field that is missing, wrong or asks for
            something not computed here; the message names it.
    """
    fields = Fields(config)
    family = _family(fields, "model_type")
    text = fields.part("text_config") or fields
    if text.raw("model_type") is not None:
        # mistral3 is around Mistral in some releases, around another decoder in others.
        family = _family(text, "text_config.model_type")
    if config.get("quantization_config") or text.raw("quantization_config"):
        raise UnsupportedModel("config.json: quantization_config is not supported yet")
    if fields.raw("tie_word_embeddings") is not None:
        # As transformers builds a multimodal model: the head is the outer model's.
        text = text.replaced(tie_word_embeddings=fields.raw("tie_word_embeddings"))
    return family.traits(text)


def _family(fields: Fields, name: str) -> Family:
    """What the model_type of `fields` is; `name` is for the message."""
    model_type = fields.raw("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModel(
            f"config.json: {name}={model_type!r} is not supported "
            f"(supported: {', '.join(sorted(FAMILIES))})"
        )
    return family
