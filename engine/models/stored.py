"""How the families' checkpoints keep their weights: names, joined matrices, conventions.

The decoder has one name and one form for each of its tensors, Llama's. A table of a family maps
parameters to the modules of its checkpoints; a tensor that lies there in another form is cut out
and turned as it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

_LAYER = "model.layers.{layer}."

STANDARD_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "head": "lm_head",
    "final_norm": "model.norm",
    "attention_norm": _LAYER + "input_layernorm",
    "attention_post_norm": _LAYER + "self_attn.post_layernorm",
    "mlp_norm": _LAYER + "post_attention_layernorm",
    "mlp_post_norm": _LAYER + "mlp.post_layernorm",
    "q": _LAYER + "self_attn.q_proj",
    "k": _LAYER + "self_attn.k_proj",
    "v": _LAYER + "self_attn.v_proj",
    "o": _LAYER + "self_attn.o_proj",
    "q_norm": _LAYER + "self_attn.q_norm",
    "k_norm": _LAYER + "self_attn.k_norm",
    "gate": _LAYER + "mlp.gate_proj",
    "up": _LAYER + "mlp.up_proj",
    "down": _LAYER + "mlp.down_proj",
    "router": _LAYER + "mlp.gate",
    "expert_gate": _LAYER + "mlp.experts.{expert}.gate_proj",
    "expert_up": _LAYER + "mlp.experts.{expert}.up_proj",
    "expert_down": _LAYER + "mlp.experts.{expert}.down_proj",
    "shared_gate": _LAYER + "mlp.shared_expert.gate_proj",
    "shared_up": _LAYER + "mlp.shared_expert.up_proj",
    "shared_down": _LAYER + "mlp.shared_expert.down_proj",
}
"""Parameter → module that holds its `.weight` and `.bias`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How the checkpoints of one family differ from Llama's.

    Attributes:
        names: as STANDARD_NAMES. Parameters with one name are parts of one matrix, their outputs
            one after the other in the order of the table. Experts without `{expert}` in their
            name are all in one tensor, [experts, in, out].
        norm_offset: what the stored weights of norms lack.
        interleaved: q and k hold the pairs of a rotation side by side, not half a head apart.
    """

    names: Mapping[str, str] = field(default_factory=lambda: STANDARD_NAMES)
    norm_offset: float = 0.0
    interleaved: bool = False


STANDARD = Stored()


def renamed(**modules: str) -> Mapping[str, str]:
    """The standard names, with other modules within a layer."""
    return {**STANDARD_NAMES, **{name: _LAYER + module for name, module in modules.items()}}


Index = tuple[int | slice, ...]
ReadPart = Callable[[str, Index], np.ndarray]
"""A checkpoint's tensor and what to take out of it → that part, in any dtype."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor of the decoder lies in a checkpoint.

    Attributes:
        tensor: its name there.
        shape: of that whole tensor.
        index: what is cut out of it.
        turned: [in, out] is stored, not [out, in].
        pairs: heads of this width hold their pairs side by side; 0 where they do not.
        offset: added in float32.
    """

    tensor: str
    shape: tuple[int, ...]
    index: Index = ()
    turned: bool = False
    pairs: int = 0
    offset: float = 0.0

    def take(self, read: ReadPart) -> np.ndarray:
        """The tensor as the decoder wants it."""
        value = read(self.tensor, self.index)
        if self.turned:
            value = value.T
        if self.pairs:
            rest = value.shape[1:]
            split = value.reshape(-1, self.pairs // 2, 2, *rest).swapaxes(1, 2)
            value = split.reshape(-1, *rest)
        return value.astype(np.float32) + np.float32(self.offset) if self.offset else value


# ---- prefixes ----

_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
_HEADS = ("lm_head.", "language_model.lm_head.")
_NOT_TEXT = ("vision_tower.", "vision_model.", "multi_modal_projector.")
_BUFFERS = ("rotary_emb.inv_freq",)


def in_checkpoint(found: Collection[str]) -> Callable[[str], str]:
    """How a checkpoint with these tensors spells "model.…" and "lm_head.…"."""
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in found), "model.")
    head = next((h for h in _HEADS if f"{h}weight" in found), "lm_head.")

    def spelled(name: str) -> str:
        if name.startswith("lm_head."):
            return head + name.removeprefix("lm_head.")
        return prefix + name.removeprefix("model.")

    return spelled


def is_superfluous(name: str) -> bool:
    """Whether a tensor says nothing of the text model.

    Buffers that old checkpoints carry and that follow from config.json, and what sees images.
    """
    return name.endswith(_BUFFERS) or name.removeprefix("model.").startswith(_NOT_TEXT)
