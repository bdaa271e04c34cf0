"""Reads tokenizer.model, a SentencePiece model, without the sentencepiece library.

It is a protobuf message (sentencepiece_model.proto); what is declared here are the fields that
a tokenizer depends on, by their numbers there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from checkpoint.errors import CheckpointError

_PACKAGE = "hexserve.sentencepiece"
_FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "Piece": {"piece": (1, "string"), "score": (2, "float"), "type": (3, "int32")},
    "Trainer": {
        "model_type": (3, "int32"),
        "treat_whitespace_as_suffix": (24, "bool"),
        "byte_fallback": (35, "bool"),
        "unk_id": (40, "int32"),
        "bos_id": (41, "int32"),
        "eos_id": (42, "int32"),
    },
    "Normalizer": {
        "precompiled_charsmap": (2, "bytes"),
        "add_dummy_prefix": (3, "bool"),
        "remove_extra_whitespaces": (4, "bool"),
        "escape_whitespaces": (5, "bool"),
    },
    "Model": {"pieces": (1, "Piece*"), "trainer": (2, "Trainer"), "normalizer": (3, "Normalizer")},
}
_DEFAULTS = {
    "type": "1",
    "model_type": "1",
    "unk_id": "0",
    "bos_id": "1",
    "eos_id": "2",
    "add_dummy_prefix": "true",
    "remove_extra_whitespaces": "true",
    "escape_whitespaces": "true",
}
BPE = 2
"""Trainer.model_type of byte-pair encoding."""


class Kind(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """What a tokenizer.model says. `bos` and `eos` are pieces, None where it has none."""

    pieces: tuple[Piece, ...]
    model_type: int
    byte_fallback: bool
    unknown: str
    bos: str | None
    eos: str | None
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    whitespace_is_plain: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Reads the SentencePiece model in `path`.

    Raises:
        CheckpointError: the file cannot be read, or is no SentencePiece model.
    """
    try:
        model: Any = _model_class().FromString(path.read_bytes())
        pieces = tuple(Piece(p.piece, p.score, Kind(p.type)) for p in model.pieces)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (message.DecodeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a SentencePiece model ({error})") from error
    trainer, normalizer = model.trainer, model.normalizer
    if not 0 <= trainer.unk_id < len(pieces):
        raise CheckpointError(f"{path}: not a SentencePiece model (it has no unknown piece)")

    def piece(index: int) -> str | None:
        return pieces[index].text if 0 <= index < len(pieces) else None

    return SentencePieceModel(
        pieces=pieces,
        model_type=trainer.model_type,
        byte_fallback=trainer.byte_fallback,
        unknown=pieces[trainer.unk_id].text,
        bos=piece(trainer.bos_id),
        eos=piece(trainer.eos_id),
        charsmap=normalizer.precompiled_charsmap,
        add_dummy_prefix=normalizer.add_dummy_prefix,
        remove_extra_whitespaces=normalizer.remove_extra_whitespaces,
        whitespace_is_plain=normalizer.escape_whitespaces
        and not trainer.treat_whitespace_as_suffix,
    )


def _model_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="hexserve_sentencepiece.proto", package=_PACKAGE, syntax="proto2"
    )
    for name, fields in _FIELDS.items():
        declared = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            repeated = kind.endswith("*")
            entry = declared.field.add(name=field, number=number, label=3 if repeated else 1)
            if kind.strip("*") in _FIELDS:
                entry.type_name = f".{_PACKAGE}.{kind.strip('*')}"
            else:
                entry.type = descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
            if field in _DEFAULTS:
                entry.default_value = _DEFAULTS[field]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))
