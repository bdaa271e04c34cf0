"""When a worker sent which token: a file that its process and the client's both map.

A request is known by its number, which travels as the prompt, for a router gives requests
names of its own. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine
share.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]

VOCAB_SIZE = 512
"""The fake model's."""
MAX_REQUESTS = 256**2
_FIRST_LETTER, _LETTERS = ord("a"), 26


def create_stamps(path: Path, requests: int, tokens: int) -> Nanoseconds:
    """An empty table of one row per request and one column per token."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=(requests, tokens))


def open_stamps(path: Path) -> Nanoseconds:
    """The table that `create_stamps` has made, to be written to."""
    return np.lib.format.open_memmap(path, mode="r+")


def prompt_of(request: int) -> tuple[int, int]:
    """The prompt that carries a request's number, as ids of the fake model's byte tokens."""
    return divmod(request, 256)


def is_number(prompt: Sequence[int]) -> bool:
    """Whether a prompt is as `prompt_of` makes them."""
    return len(prompt) == 2


def request_of(prompt: Sequence[int]) -> int:
    """The inverse of `prompt_of`."""
    high, low = prompt
    return 256 * high + low


def token_at(index: int) -> int:
    """The token at an output position: a letter, so every token has text of its own."""
    return _FIRST_LETTER + index % _LETTERS
