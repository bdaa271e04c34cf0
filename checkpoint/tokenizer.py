"""A model's tokenizer: text to token ids and back.

Reads tokenizer.json, the format of the `tokenizers` library, which also says what special
tokens are put around a text, or converts a SentencePiece tokenizer.model to it. Safe to use from
many threads.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from checkpoint.byte_level import bytes_of_token
from checkpoint.detokenizer import AnchoredDetokenizer, ByteLevelDetokenizer, Detokenizer
from checkpoint.errors import CheckpointError
from checkpoint.json_file import read_object
from checkpoint.sentencepiece_convert import convert_sentencepiece

logger = logging.getLogger("hexserve.checkpoint")

TOKENIZER_FILE = "tokenizer.json"
ORIGINAL_FILE = "tokenizer.model"

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
        self._bytes: dict[int, bytes] = {}  # of tokens seen; no more than the vocabulary has

    @classmethod
    def load(cls, folder: Path, mode: str = "auto") -> Tokenizer:
        """Loads the tokenizer of a model folder.

        `mode` "auto" reads tokenizer.json, or else converts tokenizer.model; "slow" converts
        tokenizer.model, the original from which tokenizer.json was once made.

        Raises:
            CheckpointError: the file is missing, broken, or of an unsupported kind.
        """
        path, original = folder / TOKENIZER_FILE, folder / ORIGINAL_FILE
        if original.is_file() and (mode == "slow" or not path.is_file()):
            logger.info("converting the tokenizer in %s", original)
            backend = convert_sentencepiece(original)
        elif mode == "slow":
            raise CheckpointError(
                f"{original}: no such file, which --tokenizer_mode=slow reads; this model's "
                "tokenizer is had with --tokenizer_mode=auto"
            )
        elif path.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises plain Exception
                raise CheckpointError(f"{path}: not a readable tokenizer ({error})") from error
        else:
            raise CheckpointError(_no_tokenizer(folder))
        # A file may carry the settings of its training run; serving must never cut a prompt.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend)

    def check_vocabulary(self, size: int) -> None:
        """Checks that a model of `size` tokens knows this tokenizer's.

        Tokens that were added beyond are left to the requests: many models have some for what
        they cannot do, and a prompt that holds one is refused.

        Raises:
            CheckpointError: the tokenizer's own vocabulary is larger.
        """
        highest = max(self._backend.get_vocab(with_added_tokens=False).values(), default=-1)
        if highest >= size:
            raise CheckpointError(
                f"the tokenizer does not belong to this model: it has token id {highest}, the "
                f"model's vocab_size is {size}"
            )
        beyond = [token for token in self._added if token >= size]
        if beyond:
            logger.warning(
                "%d added tokens are beyond the model's vocab_size of %d", len(beyond), size
            )

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
        (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)  # as a batch: see `encode`

    def token_text(self, token: int) -> str:
        """Returns how a token reads alone, its leading space included; "" if unknown."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Returns the exact bytes a token adds to a text; b"" if the id is unknown."""
        known = self._bytes.get(token)
        if known is not None:
            return known
        data = self._token_bytes(token)
        if data:  # ids that are none are without number
            self._bytes[token] = data
        return data

    def _token_bytes(self, token: int) -> bytes:
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


def _no_tokenizer(folder: Path) -> str:
    missing = f"{folder / TOKENIZER_FILE}: no such file, and no {ORIGINAL_FILE} either"
    config = folder / "tokenizer_config.json"
    if config.is_file() and "auto_map" in read_object(config):
        return (
            f"{missing}. The model's repository brings code for its tokenizer (auto_map), which "
            "is not run, with or without --trust_remote_code"
        )
    return (
        f"{missing}. Make one by transformers: AutoTokenizer.from_pretrained(folder)"
        ".save_pretrained(folder), or name another model's by --tokenizer"
    )


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """Names the decoder's steps, e.g. ["Replace", "ByteFallback", "Fuse", "Strip"]."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]
