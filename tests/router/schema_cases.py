"""What a request's schema says is wrong: values for each field of it, however deep it lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from router.fields import show

Schema = dict[str, Any]

VALUES: dict[str, Any] = {
    "boolean": True,
    "integer": 7,
    "number": 1.5,
    "string": "wrong",
    "array": [{}],
    "object": {"wrong": []},
}
"""One of each JSON type, none of which an enumeration has."""
UNKNOWN = "huh"
HALF_OF_A_PAIR = "a\\ud800"
"""As JSON has it."""


@dataclass(frozen=True)
class Wrong:
    """A value that must be refused.

    Attributes:
        field: its name as errors tell it, from the value on that the schema is for: ".a[0].b".
        value: in the place of that whole value.
        parts: what the error's message has to have: the value that is wrong, the limit.
    """

    field: str
    value: Any
    parts: tuple[str, ...]

    @property
    def top(self) -> str:
        """The field of the whole value that it is in."""
        return self.field.split(".")[1].partition("[")[0]


def wrong_objects(schema: Schema, base: dict[str, Any], field: str = "") -> Iterator[Wrong]:
    """Of an object's schema: `base`, which is right, with each field wrong in turn."""
    for name, inner in schema["properties"].items():
        for wrong in wrong_values(inner, f"{field}.{name}"):
            yield Wrong(wrong.field, {**base, name: wrong.value}, wrong.parts)
    for name in schema.get("required", ()):
        without = {key: value for key, value in base.items() if key != name}
        yield Wrong(f"{field}.{name}", without, ())
    if schema.get("additionalProperties") is False:
        yield Wrong(f"{field}.{UNKNOWN}", {**base, UNKNOWN: 1}, ("known field",))


def wrong_values(schema: Schema, field: str = "") -> Iterator[Wrong]:
    """All that a schema gives; those from one of its alternatives may be right in another."""
    for kind in VALUES.keys() - _kinds(schema):
        # Of a list its item is told, where that is what is wrong.
        told = show(VALUES[kind]).removeprefix("[").removesuffix("]")
        yield Wrong(field, VALUES[kind], (told,))
    for alternative in schema.get("anyOf", [schema]):
        yield from _out_of_range(alternative, field)
        if "items" in alternative:
            yield from _items(alternative, field)
        if "properties" in alternative:
            yield from wrong_objects(alternative, valid_value(alternative), field)
        if "propertyNames" in alternative:
            yield from _entries(alternative, field)


def valid_value(schema: Schema) -> Any:
    """The least that the schema takes."""
    if "enum" in schema:
        return schema["enum"][-1]
    if "anyOf" in schema:
        return valid_value(schema["anyOf"][0])
    kinds = _kinds(schema)
    if "object" in kinds:
        properties = schema.get("properties", {})
        return {name: valid_value(properties[name]) for name in schema.get("required", ())}
    if "array" in kinds:
        return [valid_value(schema["items"])] * schema.get("minItems", 0)
    if "string" in kinds:
        return "x" * schema.get("minLength", 0)
    return schema.get("minimum", 0) if "integer" in kinds else None


def _kinds(schema: Schema) -> set[str]:
    """The JSON types that a value may have; those of an enumeration's values are told by it."""
    if "enum" in schema:
        return set()
    if "$ref" in schema:  # the model's name
        return {"string"}
    if "anyOf" in schema:
        return {kind for each in schema["anyOf"] for kind in _kinds(each)}
    kinds = schema.get("type", list(VALUES))
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    return found | {"integer"} if "number" in found else found


def _out_of_range(schema: Schema, field: str) -> Iterator[Wrong]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None:
        yield Wrong(field, low - 1, (str(low), str(low - 1)))
    if high is not None:
        yield Wrong(field, high + 1, (str(high), str(high + 1)))
    if "string" in _kinds(schema) and "type" in schema:
        yield Wrong(field, json.loads(f'"{HALF_OF_A_PAIR}"'), ("surrogate",))
        if schema.get("minLength"):
            yield Wrong(field, "", ())
        if "maxLength" in schema:
            length = schema["maxLength"] + 1
            yield Wrong(field, "x" * length, (str(schema["maxLength"]), str(length)))


def _items(schema: Schema, field: str) -> Iterator[Wrong]:
    item, least, most = schema["items"], schema.get("minItems", 0), schema.get("maxItems")
    if least:
        yield Wrong(field, [], ())
    if most is not None:
        yield Wrong(field, [valid_value(item)] * (most + 1), (str(most), str(most + 1)))
    for wrong in wrong_values(item, f"{field}[0]"):
        yield Wrong(wrong.field, [wrong.value], wrong.parts)
    for wrong in wrong_values(item, f"{field}[1]"):
        yield Wrong(wrong.field, [valid_value(item), wrong.value], wrong.parts)


def _entries(schema: Schema, field: str) -> Iterator[Wrong]:
    """Of an object whose names are numbers."""
    most = schema["maxProperties"]
    good = valid_value(schema["additionalProperties"])
    yield Wrong(field, {"wrong": good}, ('"wrong"',))
    too_many = {str(number): good for number in range(most + 1)}
    yield Wrong(field, too_many, (str(most), str(most + 1)))
    for wrong in wrong_values(schema["additionalProperties"]):
        yield Wrong(field, {"5": wrong.value}, ('"5"', *wrong.parts))


def encoded(body: Any) -> bytes:
    """A body whose strings may hold halves of surrogate pairs."""
    return json.dumps(body).encode()
