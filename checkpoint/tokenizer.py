"""A model's tokenizer: text to token ids and back.

Reads tokenizer.json, the format of the `tokenizers` library, which also says what special
tokens are put around a text. Safe to use from many threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from checkpoint.byte_level import bytes_of_token
from checkpoint.detokenizer import AnchoredDetokenizer, ByteLevelDetokenizer, Detokenizer
from checkpoint.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NOTHING: frozenset[int] = frozenset()


class Tokenizer:
    """One loaded tokenizer. Made by `Tokenizer.load`; immutable."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token for token in added if added[token].special)
        kinds = _decoder_kinds(backend)
        self._is_byte_level = kinds == ["ByteLevel"]
        if "ByteLevel" in kinds and not self._is_byte_level:
            raise CheckpointError(
                f"{TOKENIZER_FILE}: a ByteLevel decoder combined with others is not supported "
                f"({', '.join(kinds)})"
            )
        self._has_byte_tokens = "ByteFallback" in kinds
        self._marks_spaces = self._has_byte_tokens or "Metaspace" in kinds

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Loads the tokenizer of a model folder.

        Raises:
            CheckpointError: tokenizer.json is missing, broken, or of an unsupported kind.
        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{path}: no such file; a model needs its tokenizer in this format"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path}: not a readable tokenizer ({error})") from error
        # A file may carry the settings of its training run; serving must never cut a prompt.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`.

        Special tokens written out in the text become their ids. `add_special_tokens` adds
        those that tokenizer.json puts around every text, such as a beginning-of-sequence.

        Raises:
            ValueError: the text has a lone surrogate and thus no UTF-8 form.
        """
        try:
            # As a batch: `encode` of a long text would hold up every other thread meanwhile.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise ValueError("the text has a lone surrogate, so it is not valid Unicode") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; bytes that are not valid UTF-8 become U+FFFD.

        Ids that the tokenizer does not know have no text.
        """
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """Returns how a token reads alone, its leading space included; "" if unknown."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Returns the exact bytes a token adds to a text; b"" if the id is unknown."""
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._is_byte_level:
            return bytes_of_token(piece)
        if token not in self._added:
            if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(piece)):
                return bytes.fromhex(match[1])
            if self._marks_spaces:
                piece = piece.replace("▁", " ")
        return str(piece).encode("utf-8")

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a fresh detokenizer; its pieces add up to what `decode` gives."""
        skipped = self._special if skip_special_tokens else _NOTHING
        if self._is_byte_level:
            return ByteLevelDetokenizer(self.token_bytes, skipped)
        return AnchoredDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=False),
            self._is_single_byte,
            lambda token: token not in skipped and self._backend.id_to_token(token) is not None,
        )

    def _is_single_byte(self, token: int) -> bool:
        piece = self._backend.id_to_token(token) if self._has_byte_tokens else None
        return piece is not None and _BYTE_TOKEN.fullmatch(piece) is not None


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """Names the decoder's steps, e.g. ["Replace", "ByteFallback", "Fuse", "Strip"]."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]
