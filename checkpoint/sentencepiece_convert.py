"""From a SentencePiece tokenizer.model to the tokenizer that tokenizer.json would hold.

Llama 2, Gemma and Mistral were first published with tokenizer.model alone. Only byte-pair
encoding is converted: every decoder-only family that came with such a file uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from checkpoint.errors import CheckpointError
from checkpoint.json_file import read_object
from checkpoint.sentencepiece_file import BPE, Kind, SentencePieceModel, read_sentencepiece

SPACE = "▁"
"""What stands for a space within pieces."""


def convert_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """Converts the tokenizer.model in `path`, with what the JSON files beside it add to it.

    Raises:
        CheckpointError: a file is broken, or the model is of a kind that is not converted.
    """
    model = read_sentencepiece(path)
    _check(model, path)
    ids = {piece.text: index for index, piece in enumerate(model.pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=ids,
            merges=list(_merges(model, ids)),
            unk_token=model.unknown,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*steps, spaces])
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)

    config_path = path.parent / "tokenizer_config.json"
    config = read_object(config_path) if config_path.is_file() else {}
    _add_tokens(backend, model, config, path)
    around = _around_text(model, config)
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join("$A" if token is None else token for token in around),
            special_tokens=[(token, ids[token]) for token in around if token is not None],
        )
    return backend


def _check(model: SentencePieceModel, path: Path) -> None:
    reason = None
    if model.model_type != BPE:
        reason = "it is no byte-pair encoding (model_type BPE)"
    elif model.remove_extra_whitespaces:
        reason = "it removes white space (remove_extra_whitespaces)"
    elif not model.whitespace_is_plain:
        reason = "it marks white space in an unusual way"
    if reason is not None:
        raise CheckpointError(
            f"{path}: cannot be converted, {reason}. Make a tokenizer.json by transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )


def _merges(model: SentencePieceModel, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Pairs of pieces that make a piece, the best-scored piece first."""
    # Python's sort is stable: pieces of equal score stay in the order of their ids.
    for piece in sorted(model.pieces, key=lambda piece: piece.score, reverse=True):
        if piece.kind is not Kind.NORMAL:
            continue
        cuts = (
            (piece.text[:cut], piece.text[cut:])
            for cut in range(1, len(piece.text))
            if piece.text[:cut] in ids and piece.text[cut:] in ids
        )
        yield from sorted(cuts, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _add_tokens(
    backend: tokenizers.Tokenizer, model: SentencePieceModel, config: Mapping[str, Any], path: Path
) -> None:
    """The pieces that are found in a text before it is encoded, and those of the JSON files."""
    tokens: dict[int, AddedToken] = {}
    for index, piece in enumerate(model.pieces):
        if piece.kind in (Kind.CONTROL, Kind.UNKNOWN):
            tokens[index] = AddedToken(piece.text, special=True, normalized=False)
        elif piece.kind is Kind.USER_DEFINED:
            # Spaces in it are those of the normalized text, which may have one more in front.
            plain = not model.add_dummy_prefix
            tokens[index] = AddedToken(piece.text, special=False, normalized=plain)
    old = path.parent / "added_tokens.json"
    for content, index in (read_object(old) if old.is_file() else {}).items():
        tokens[_index(index, old)] = AddedToken(content, special=True, normalized=False)
    for index, entry in (config.get("added_tokens_decoder") or {}).items():
        match entry:
            case {"content": str(content)}:
                options = {
                    name: bool(entry.get(name))
                    for name in ("special", "normalized", "lstrip", "rstrip", "single_word")
                }
                tokens[_index(index, path)] = AddedToken(content, **options)
            case _:
                raise CheckpointError(f"{path.parent}: added_tokens_decoder has a bad {entry!r}")
    for index, token in sorted(tokens.items()):
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if backend.token_to_id(token.content) != index:
            raise CheckpointError(
                f"{path.parent}: the added token {token.content!r} should have id {index}, "
                f"its place in the vocabulary is {backend.token_to_id(token.content)}"
            )


def _index(value: Any, path: Path) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise CheckpointError(f"{path}: an added token has the id {value!r}") from None


def _around_text(model: SentencePieceModel, config: Mapping[str, Any]) -> list[str | None]:
    """The special tokens around every text, with None for the text; [] where there are none."""
    bos = model.bos if config.get("add_bos_token", True) else None
    eos = model.eos if config.get("add_eos_token", False) else None
    if bos is None and eos is None:
        return []
    return [*([bos] if bos else []), None, *([eos] if eos else [])]
