"""Typed access to config.json that names the field in its errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.models.traits import UnsupportedModel

_REQUIRED: Any = object()


class Fields:
    """One object of config.json. A field that is null counts as missing, unless it says so.

    All raise UnsupportedModel: a field is missing and has no default, or is of another type.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def integer(self, name: str, default: int = _REQUIRED) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModel(f"config.json: {name}={value!r} is not a positive integer")
        return value

    def number(self, name: str, default: float = _REQUIRED) -> float:
        value = self._get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:  # JSON as Python reads it has NaN
            raise UnsupportedModel(f"config.json: {name}={value!r} is not a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"config.json: {name}={value!r} is not true or false")
        return value

    def integer_or_none(self, name: str, default: int | None) -> int | None:
        """null means None; only a field that is not there has the default."""
        if self._raw.get(name, default) is None:
            return None
        return self.integer(name, default or 0)

    def count(self, name: str, default: int) -> int:
        """A whole number that may be 0."""
        return 0 if self._raw.get(name) == 0 else self.integer(name, default)

    def number_or_none(self, name: str, default: float | None) -> float | None:
        """null means None; only a field that is not there has the default."""
        if self._raw.get(name, default) is None:
            return None
        return self.number(name, default or 0.0)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or len(value) != count:
            raise UnsupportedModel(f"config.json: {name} is not a list of {count} numbers")
        return tuple(Fields({name: item}).number(name) for item in value)

    def per_layer(self, name: str, layers: int) -> list[Any] | None:
        """A list with an item for each layer at least; None where it is missing or empty."""
        value = self._raw.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or len(value) < layers:
            raise UnsupportedModel(f"config.json: {name} is not a list of {layers} items")
        return value[:layers]

    def layers(self, name: str) -> list[int] | None:
        """A list of numbers of layers, or None where there is none."""
        value = self._raw.get(name)
        if value is not None and not isinstance(value, list):
            raise UnsupportedModel(f"config.json: {name} is not a list of layers")
        return value

    def part(self, name: str) -> Fields | None:
        """The object `name`, or None where there is none."""
        value = self._raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise UnsupportedModel(f"config.json: {name} is not an object")
        return None if value is None else Fields(value)

    def with_defaults(self, **defaults: Any) -> Fields:
        """The same object, in which missing fields have these values."""
        return self.replaced(**{n: v for n, v in defaults.items() if self._raw.get(n) is None})

    def replaced(self, **values: Any) -> Fields:
        """The same object with these fields."""
        return Fields({**self._raw, **values})

    def raw(self, name: str, default: Any = None) -> Any:
        """As it is, null too; only a field that is not there has the default."""
        return self._raw.get(name, default)

    def _get(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        if value is None:
            if default is _REQUIRED:
                raise UnsupportedModel(f"config.json: the field {name!r} is missing")
            return default
        return value
