"""The names of attempts on the wire."""

from __future__ import annotations

from engine.types import AttemptId
from protos.errors import WireError

MAX_ID_CHARACTERS = 256


def decode_attempt(request_id: str, attempt: int) -> AttemptId:
    """Raises WireError for an id that is empty or too long."""
    if not 0 < len(request_id) <= MAX_ID_CHARACTERS:
        raise WireError(f"a request_id of {len(request_id)} characters")
    return AttemptId(request_id, attempt)
