"""Token ids to text, piece by piece as they arrive.

Both kinds keep one promise: the pieces joined are exactly what decoding all the ids at once
gives, and no piece holds a character that later ids could still change. (The `DecodeStream`
of the tokenizers library breaks it where bytes are not valid UTF-8.)
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence


class Detokenizer(ABC):
    """The text of one growing token sequence. Not thread-safe; one per sequence."""

    @abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids and returns the text that is certain now, perhaps "".

        Ids that the tokenizer does not know have no text. Costs time in proportion to the
        new ids only.
        """

    @abstractmethod
    def flush(self) -> str:
        """Returns what was held back; call it once, after the last id.

        Bytes that never became a character come out as U+FFFD.
        """


class ByteLevelDetokenizer(Detokenizer):
    """For byte-level tokenizers, where the text is the tokens' bytes decoded as UTF-8."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._amid_character = False

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1:
            data = b"" if ids[0] in self._skipped else self._token_bytes(ids[0])
        else:
            shown = [self._token_bytes(token) for token in ids if token not in self._skipped]
            data = b"".join(shown)
        if data.isascii() and not self._amid_character:
            return data.decode("ascii")
        text = self._utf8.decode(data)
        self._amid_character = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class AnchoredDetokenizer(Detokenizer):
    """For all other tokenizers, by decoding each new run of ids behind one earlier id.

    Their decoders treat the first token of a text differently (a leading space is dropped)
    and otherwise render token after token, so the last id already shown serves as an anchor
    whose own text is cut off. Only a run of single-byte tokens must be decoded as a whole:
    it is one text if it is valid UTF-8 and replacement characters if not, so it is held
    until an id ends it.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_single_byte: Callable[[int], bool],
        is_shown: Callable[[int], bool],
    ) -> None:
        self._decode = decode
        self._is_single_byte = is_single_byte
        self._is_shown = is_shown
        self._anchor: list[int] = []  # the last id whose text is out, none at first
        self._held: list[int] = []  # ids after it

    def push(self, ids: Sequence[int]) -> str:
        self._held += [token for token in ids if self._is_shown(token)]
        ready = len(self._held)
        while ready and self._is_single_byte(self._held[ready - 1]):
            ready -= 1
        return self._release(ready)

    def flush(self) -> str:
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        if count == 0:
            return ""
        run, self._held = self._held[:count], self._held[count:]
        known = len(self._decode(self._anchor)) if self._anchor else 0
        text = self._decode(self._anchor + run)
        self._anchor = run[-1:]
        return text[known:]
