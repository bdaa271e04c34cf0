"""Reads config.json and generation_config.json: what a model says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from checkpoint.errors import CheckpointError
from checkpoint.json_file import read_object

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_UNSAID: dict[str, dict[str, Any]] = {
    "gemma3_text": {"vocab_size": 262208, "max_position_embeddings": 131072},
}
"""What releases leave out of config.json, as transformers fills it in."""

T = TypeVar("T", str, int, float, bool, list, dict)


@dataclass(frozen=True)
class CheckpointConfig:
    """The facts of a model folder that every room needs.

    Attributes:
        path: the config.json they were read from, for messages.
        raw: config.json as it is; the engine reads its architecture from it.
        model_type: names the architecture.
        vocab_size: number of logits; token ids run from 0 to vocab_size - 1.
        max_position_embeddings: most tokens in one sequence.
        dtype: name of the dtype that the weights are meant to have, None if it is not said.
        eos_token_ids: ids that end a sequence, generation_config.json's first, then those
            that only config.json names; may be empty.
        generation_defaults: the model's own sampling defaults, those of temperature, top_p,
            top_k, min_p and repetition_penalty that generation_config.json gives.
    """

    path: Path
    raw: dict[str, Any]
    model_type: str
    vocab_size: int
    max_position_embeddings: int
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]


def read_config(folder: Path, generation_config: str = "auto") -> CheckpointConfig:
    """Reads and checks the configuration in a model folder.

    `generation_config` "ignore" leaves generation_config.json out.

    Raises:
        CheckpointError: config.json is missing or broken, generation_config.json is broken,
            or a field they must have is missing or makes no sense.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        what = "not a model folder, it has no config.json" if folder.is_dir() else "no such folder"
        raise CheckpointError(f"{folder}: {what}")
    raw = read_object(path)
    generation_path = folder / GENERATION_FILE
    wanted = generation_config != "ignore" and generation_path.is_file()
    generation = read_object(generation_path) if wanted else {}
    # A model of text and images says in text_config what its text part is; what is null there
    # may be said around it.
    text = raw.get("text_config")
    said = text.items() if isinstance(text, dict) else ()
    values = raw | {name: value for name, value in said if value is not None}
    values = _UNSAID.get(str(values.get("model_type")), {}) | values

    vocab_size = _positive(values, "vocab_size", path)
    eos_ids = dict.fromkeys(_eos_ids(generation, generation_path) + _eos_ids(values, path))
    for token in eos_ids:
        if not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{path}: eos_token_id {token} is not below vocab_size {vocab_size}"
            )
    return CheckpointConfig(
        path=path,
        raw=raw,
        model_type=_require(raw, "model_type", str, path),
        vocab_size=vocab_size,
        max_position_embeddings=_positive(values, "max_position_embeddings", path),
        dtype=_dtype(values, path),
        eos_token_ids=tuple(eos_ids),
        generation_defaults={
            name: _require(generation, name, float, generation_path)
            for name in _SAMPLING_FIELDS
            if generation.get(name) is not None
        },
    )


def _require(values: dict[str, Any], name: str, kind: type[T], path: Path) -> T:
    """The field `name`; `float` takes whole numbers too, `int` takes no booleans."""
    if name not in values:
        raise CheckpointError(f"{path}: the field {name!r} is missing")
    value = values[name]
    accepted: Any = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise CheckpointError(
            f"{path}: the field {name!r} must be of type {kind.__name__}, not {value!r}"
        )
    return value


def _positive(values: dict[str, Any], name: str, path: Path) -> int:
    value = _require(values, name, int, path)
    if value < 1:
        raise CheckpointError(f"{path}: the field {name!r} must be at least 1, not {value}")
    return value


def _dtype(values: dict[str, Any], path: Path) -> str | None:
    for name in ("dtype", "torch_dtype"):
        if values.get(name) is not None:
            return _require(values, name, str, path).removeprefix("torch.")
    return None


def _eos_ids(values: dict[str, Any], path: Path) -> list[int]:
    given = values.get("eos_token_id")
    if given is None:
        return []
    tokens = given if isinstance(given, list) else [given]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise CheckpointError(
                f"{path}: the field 'eos_token_id' must be an id or a list of ids, not {given!r}"
            )
    return tokens
