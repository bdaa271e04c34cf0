"""Long JSON, written so that it can be done in a thread."""

from __future__ import annotations

from typing import Any

from router.answers import encode_json


def written(value: Any, most: int) -> str:
    """The JSON of a value, no more than `most` items of a list by one call of the encoder.

    One call lets no other thread run. Objects are gone into, as are lists of one item.
    """
    if isinstance(value, dict):
        return f"{{{','.join(f'{encode_json(k)}:{written(v, most)}' for k, v in value.items())}}}"
    if isinstance(value, list) and len(value) == 1:
        return f"[{written(value[0], most)}]"
    if isinstance(value, list) and len(value) > most:
        slices = (value[at : at + most] for at in range(0, len(value), most))
        return f"[{','.join(encode_json(each)[1:-1] for each in slices)}]"
    return encode_json(value)
