"""Reads the fields of a JSON object, one by one, with errors that name field, value and limit."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from router.errors import BadRequest

_SHOWN_CHARACTERS = 60
_ENCODER = json.JSONEncoder()


def show(value: object) -> str:
    """A value as JSON for an error message, shortened: no more of it is encoded than is shown."""
    if isinstance(value, str):
        value = value[: _SHOWN_CHARACTERS + 1]
    text = ""
    try:
        for part in _ENCODER.iterencode(value):
            text += part
            if len(text) > _SHOWN_CHARACTERS:
                break
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def is_integer(value: object) -> bool:
    """True for a JSON integer; JSON's true and false are no integers."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_text(value: object, param: str) -> str:
    """The value as a string that can be encoded as UTF-8.

    Raises:
        BadRequest: it is no string, or it holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise BadRequest(f"{param} must be a string, got {show(value)}", param=param)
    # ASCII, the usual case, is known without a scan; the rest is encoded once to be sure.
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"{param} is not valid Unicode: character {error.start} is half of a surrogate "
                f"pair, got {show(value[error.start])}",
                param=param,
            ) from None
    return value


def check_json(value: object, param: str) -> None:
    """Refuse what was parsed and cannot be written again, as an answer or a template would.

    Python's parser takes 1e999, which is infinite then, and halves of surrogate pairs in escapes.

    Raises:
        BadRequest: there is such a value, or it is nested too deeply.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise BadRequest(
            f"{param} has a number that is not finite, half of a surrogate pair, or too deep a "
            f"nesting, got {show(value)}",
            param=param,
        ) from None


class Fields:
    """The fields of one JSON object.

    Each reader takes a field at most once; null counts as absent. `finish` then refuses what
    no reader asked for, so that a misspelt field is never ignored in silence.

    Args:
        data: the object.
        prefix: goes before each name in errors, such as "messages[2].".
        integral_floats: take 5.0 for 5, as senders whose JSON has only floats write it.
    """

    def __init__(
        self, data: Mapping[str, Any], *, prefix: str = "", integral_floats: bool = False
    ) -> None:
        self._data = data
        self._prefix = prefix
        self._integral_floats = integral_floats
        self._taken: set[str] = set()

    def param(self, name: str) -> str:
        """The field's full name for an error."""
        return self._prefix + name

    def raw(self, name: str) -> Any:
        """The field as it is, or None."""
        self._taken.add(name)
        return self._data.get(name)

    def optional_integer(
        self, name: str, *, low: int | None = None, high: int | None = None
    ) -> int | None:
        """An integer from `low` to `high`, both included; None when absent."""
        value = self.raw(name)
        if value is None:
            return None
        if self._integral_floats and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not is_integer(value) or _outside(value, low, high):
            raise self._wrong(name, f"an integer{_range(low, high)}", value)
        return int(value)

    def integer(
        self, name: str, default: int, *, low: int | None = None, high: int | None = None
    ) -> int:
        """An integer from `low` to `high`, both included; `default` when absent."""
        value = self.optional_integer(name, low=low, high=high)
        return default if value is None else value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """A finite number from `low` to `high`, both included; `default` when absent."""
        value = self.raw(name)
        if value is None:
            return default
        right = isinstance(value, float) or is_integer(value)
        if not right or (isinstance(value, float) and not math.isfinite(value)):
            raise self._wrong(name, f"a number{_range(low, high)}", value)
        if _outside(value, low, high):
            raise self._wrong(name, f"a number{_range(low, high)}", value)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false; `default` when absent."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string; `default` when absent."""
        value = self.raw(name)
        return default if value is None else check_text(value, self.param(name))

    def only(self, name: str, neutral: Collection[Any], why: str) -> None:
        """Refuse the field unless it is absent or one of the values that ask for nothing."""
        value = self.raw(name)
        # In Python True equals 1, in JSON it does not.
        if value is None or any(
            isinstance(value, bool) is isinstance(n, bool) and value == n for n in neutral
        ):
            return
        raise BadRequest(
            f"{self.param(name)}={show(value)} is not supported: {why}", param=self.param(name)
        )

    def ignore(self, names: Collection[str]) -> None:
        """Take fields that have no effect here."""
        self._taken.update(names)

    def finish(self) -> None:
        """Refuse a field that no reader has asked for."""
        for name, value in self._data.items():
            if name not in self._taken:
                param = self.param(show(name)[1:-1])
                raise BadRequest(f"{param}={show(value)} is not a known field", param=param)

    def _wrong(self, name: str, wanted: str, value: object) -> BadRequest:
        param = self.param(name)
        return BadRequest(f"{param} must be {wanted}, got {show(value)}", param=param)


def _outside(value: float, low: float | None, high: float | None) -> bool:
    return (low is not None and value < low) or (high is not None and value > high)


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return "" if low is None else f" of at least {low}"
