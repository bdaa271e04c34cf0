"""The flags of the model: where it is, how its weights are loaded, and what the API calls it."""

from __future__ import annotations

from settings.flag_values import to_positive, to_seed
from settings.flags import Flag, Group, switch

MODEL = Group(
    "model",
    (
        Flag(
            "model",
            "Hugging Face model id, gs://bucket/folder, local folder, `demo`, or `fake` (no "
            "arithmetic: for tests)",
        ),
        Flag("revision", "revision of a Hugging Face model id"),
        switch(
            "trust_remote_code",
            "taken for old command lines: code from a repository is never run, and a model that "
            "needs it is refused",
            False,
        ),
        Flag(
            "generation_config",
            "auto takes default sampling and further end tokens from the model's "
            "generation_config.json, ignore does not",
            default="auto", choices=("auto", "ignore"),
        ),
        Flag("seed", "seeds every generator", to_seed, 0),
    ),
)  # fmt: skip

API = Group(
    "API",
    (
        Flag("served_model_name", "name of the model in the API (default: --model)"),
        Flag("tokenizer", "the tokenizer's model id or folder (default: the model's)"),
        Flag(
            "tokenizer_mode",
            "auto takes tokenizer.json where there is one, slow the original tokenizer.model",
            default="auto", choices=("auto", "slow"),
        ),
    ),
)  # fmt: skip

WEIGHTS = Group(
    "weights and context",
    (
        Flag(
            "load_format", "auto, or dummy for random weights", default="auto",
            choices=("auto", "dummy"),
        ),
        Flag(
            "dtype",
            "of weights and activations; auto is the checkpoint's, on CPU float32",
            default="auto",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
        Flag(
            "quantization",
            "of the weights, when they are loaded: int8 has a scale for each output",
            default="none",
            choices=("none", "int8"),
        ),
        Flag(
            "max_model_len", "most tokens of prompt and output (default: config.json)", to_positive
        ),
        Flag(
            "sliding_window", "tokens that layers with a window see (default: config.json)",
            to_positive,
        ),
    ),
)  # fmt: skip
