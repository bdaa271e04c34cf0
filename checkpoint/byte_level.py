"""The alphabet of byte-level BPE: each of the 256 bytes has one printable character.

Bytes that are printable in Latin-1 stand for themselves; the others take, in order, the
characters from U+0100 on (so a space is "Ġ" and a newline "Ċ").
"""

from __future__ import annotations


def _alphabet() -> str:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(spare)) for byte in range(256))


CHAR_OF_BYTE = _alphabet()
"""CHAR_OF_BYTE[b] is the character for byte b."""

_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}


def bytes_of_token(token: str) -> bytes:
    """Returns the bytes that a byte-level token stands for.

    A token with any character outside the alphabet was added as plain text and stands for
    its UTF-8 bytes, as the byte-level decoder of `tokenizers` has it.
    """
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode("utf-8")
