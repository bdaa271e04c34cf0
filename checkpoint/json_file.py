"""Reads JSON objects from a model folder."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from checkpoint.errors import CheckpointError


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parses `data` as one JSON object without repeated keys.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, or a key given twice;
            the message begins with `where`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise CheckpointError(f"{where}: the key {key!r} is given twice")
        return result

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 text ({error})") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: JSON nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must hold a JSON object, not {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in `path`.

    Raises:
        CheckpointError: the file is missing, unreadable, or not one JSON object.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_object(data, str(path))
