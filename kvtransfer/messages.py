"""The messages of the transfer protocol and their validation.

Who sends what and when is in `kvtransfer.protocol`. On the wire a message is a msgpack map
with the key `type` and exactly the fields below. `from_header` trusts nothing: types, ranges
and sizes are checked, and whatever is wrong is a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtransfer.errors import ProtocolError
from kvtransfer.layout import ArraySpec, KVLayout

PROTOCOL_VERSION = 3

MAX_TOKENS = 2**31 - 1
MAX_TRANSFER_ID_BYTES = 64
MAX_TEXT_CHARS = 8192
MAX_ARRAYS = 64
MAX_WINDOW = 1024
MAX_TRAILER_BYTES = 1 << 20
MAX_PIECES = 1024
LARGEST_CHECKSUM = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Claim:
    """Reader: I want this transfer, probably from `from_token` on; this is my layout."""

    version: int
    transfer_id: bytes
    from_token: int
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class Admitted:
    """Source: blocks for `tokens` tokens are reserved; at most `window` chunks unacknowledged."""

    tokens: int
    window: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Reader: I have room; send from `from_token` on (may differ from the claim's)."""

    from_token: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Reader: I am alive and still without room; a sign of progress for the lease."""


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """One array of a chunk as its source declares it. `shape` is [layers, tokens, heads, width]."""

    name: str
    dtype: str
    shape: tuple[int, int, int, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Source: KV of tokens [start, stop). `slot` is the credit it uses.

    `group` says which layers it holds, see `kvtransfer.layout`; `layers` counts among them.
    `checksum` is the xxh3_64 of the payload, 0 for one that stays on the devices.
    """

    slot: int
    group: int
    start: int
    stop: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    arrays: tuple[ArrayHeader, ...]
    checksum: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Reader: I no longer look at the chunks that began at these tokens."""

    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Source: that was all; `trailer` is the owner's, opaque here."""

    trailer: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """Reader: all is in my own memory; release yours."""


@dataclass(frozen=True, slots=True)
class Released:
    """Source: my blocks are released; the connection may serve another claim."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Reader: I no longer want it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Source: the transfer is over; `code` is that of a class in `kvtransfer.errors`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SegmentOpened:
    """Source, shm only: the file descriptor beside this frame holds `slots` times `slot_bytes`."""

    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Parked:
    """Source, jax only: the arrays of the next chunk wait at a transfer server.

    Each array of the chunk is cut into `pieces` by heads and padded to `tokens` tokens.
    """

    uuid: int
    address: str
    pieces: int
    tokens: int


Message = (
    Claim
    | Admitted
    | Pull
    | Renew
    | ChunkHeader
    | Ack
    | End
    | Done
    | Released
    | Cancel
    | Failed
    | SegmentOpened
    | Parked
)


class _Fields:
    """Checked access to the fields of one untrusted map."""

    def __init__(self, what: str, value: object, names: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"{what}: expected a map, got {type(value).__name__}")
        expected = set(names.split())
        if set(value) != expected:
            wrong = sorted(map(repr, set(value) ^ expected))[:8]
            raise ProtocolError(f"{what}: missing or unexpected fields {', '.join(wrong)[:200]}")
        self._what = what
        self._values: dict[str, Any] = value

    def _bad(self, name: str, why: str) -> ProtocolError:
        return ProtocolError(f"{self._what}: field {name!r} {why}")

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._values[name]
        if type(value) is not int:
            raise self._bad(name, "must be an integer")
        if not low <= value <= high:
            raise self._bad(name, f"must be from {low} to {high}, got {value}")
        return value

    def binary(self, name: str, low: int, high: int) -> bytes:
        value = self._values[name]
        if type(value) is not bytes or not low <= len(value) <= high:
            raise self._bad(name, f"must be {low} to {high} bytes")
        return value

    def text(self, name: str) -> str:
        value = self._values[name]
        if type(value) is not str or len(value) > MAX_TEXT_CHARS:
            raise self._bad(name, f"must be a string of at most {MAX_TEXT_CHARS} characters")
        return value

    def items(self, name: str, low: int, high: int) -> list[Any]:
        value = self._values[name]
        if type(value) is not list or not low <= len(value) <= high:
            raise self._bad(name, f"must be a list of {low} to {high} items")
        return value

    def integers(self, name: str, low: int, high: int) -> list[int]:
        values = self.items(name, low, high)
        if any(type(v) is not int or not 0 <= v <= MAX_TOKENS for v in values):
            raise self._bad(name, "must hold non-negative integers")
        return values

    def span(self, name: str) -> tuple[int, int]:
        low, high = self.integers(name, 2, 2)
        if low >= high:
            raise self._bad(name, f"must be a range that is not empty, got [{low}, {high})")
        return low, high


def to_header(message: Message) -> dict[str, Any]:
    """The map that stands for `message` on the wire."""
    fields: dict[str, Any] = {}
    for name in message.__dataclass_fields__:
        value = getattr(message, name)
        if isinstance(value, KVLayout):
            value = {
                "fingerprint": value.fingerprint,
                "arrays": [_plain(spec) for spec in value.arrays],
                "windowed_layers": value.windowed_layers,
                "reach": value.reach or 0,
            }
        elif name == "arrays":
            value = [_plain(array) for array in value]
        fields[name] = value
    return {"type": _NAMES[type(message)], **fields}


def _plain(item: ArraySpec | ArrayHeader) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__dataclass_fields__}


def from_header(header: object) -> Message:
    """The message that `header` stands for. Raises ProtocolError and nothing else."""
    if not isinstance(header, dict):
        raise ProtocolError(f"header: expected a map, got {type(header).__name__}")
    name = header.get("type")
    parse = _PARSERS.get(name) if isinstance(name, str) else None
    if parse is None:
        raise ProtocolError(f"unknown message type {str(name)[:64]!r}")
    return parse({key: value for key, value in header.items() if key != "type"})


def _claim(body: dict) -> Claim:
    # Before the fields: another version may have others, and the version is what to report.
    version = body.get("version")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the reader speaks protocol version {str(version)[:32]}, "
            f"the source version {PROTOCOL_VERSION}"
        )
    fields = _Fields("claim", body, "version transfer_id from_token layout")
    return Claim(
        PROTOCOL_VERSION,
        fields.binary("transfer_id", 1, MAX_TRANSFER_ID_BYTES),
        fields.integer("from_token", 0, MAX_TOKENS),
        _layout(body["layout"]),
    )


def _layout(body: object) -> KVLayout:
    fields = _Fields("layout", body, "fingerprint arrays windowed_layers reach")
    arrays = [_array_spec(item) for item in fields.items("arrays", 1, MAX_ARRAYS)]
    windowed = fields.integer("windowed_layers", 0, MAX_TOKENS)
    reach = fields.integer("reach", 0, MAX_TOKENS) or None
    try:
        return KVLayout(fields.text("fingerprint"), tuple(arrays), windowed, reach)
    except ValueError as error:
        raise ProtocolError(f"layout: {error}") from None


def _array_spec(body: object) -> ArraySpec:
    fields = _Fields("array of a layout", body, "name dtype layers heads width")
    try:
        return ArraySpec(
            fields.text("name"),
            fields.text("dtype"),
            fields.integer("layers", 1, MAX_TOKENS),
            fields.integer("heads", 1, MAX_TOKENS),
            fields.integer("width", 1, MAX_TOKENS),
        )
    except ValueError as error:
        raise ProtocolError(f"layout: {error}") from None


def _array_header(body: object) -> ArrayHeader:
    fields = _Fields("array of a chunk", body, "name dtype shape nbytes")
    layers, tokens, heads, width = fields.integers("shape", 4, 4)
    return ArrayHeader(
        fields.text("name"),
        fields.text("dtype"),
        (layers, tokens, heads, width),
        fields.integer("nbytes", 0, 2**40),
    )


def _chunk(body: dict) -> ChunkHeader:
    fields = _Fields("chunk", body, "slot group start stop layers heads arrays checksum")
    start = fields.integer("start", 0, MAX_TOKENS - 1)
    return ChunkHeader(
        slot=fields.integer("slot", 0, MAX_WINDOW - 1),
        group=fields.integer("group", 0, MAX_TOKENS),
        start=start,
        stop=fields.integer("stop", start + 1, MAX_TOKENS),
        layers=fields.span("layers"),
        heads=fields.span("heads"),
        arrays=tuple(_array_header(item) for item in fields.items("arrays", 1, MAX_ARRAYS)),
        checksum=fields.integer("checksum", 0, LARGEST_CHECKSUM),
    )


def _admitted(body: dict) -> Admitted:
    fields = _Fields("admitted", body, "tokens window")
    return Admitted(
        fields.integer("tokens", 0, MAX_TOKENS), fields.integer("window", 1, MAX_WINDOW)
    )


def _segment(body: dict) -> SegmentOpened:
    fields = _Fields("segment", body, "slots slot_bytes")
    return SegmentOpened(
        fields.integer("slots", 1, MAX_WINDOW), fields.integer("slot_bytes", 1, 2**32)
    )


def _parked(body: dict) -> Parked:
    fields = _Fields("parked", body, "uuid address pieces tokens")
    return Parked(
        fields.integer("uuid", 0, 2**63 - 1),
        fields.text("address"),
        fields.integer("pieces", 1, MAX_PIECES),
        fields.integer("tokens", 1, MAX_TOKENS),
    )


def _failed(body: dict) -> Failed:
    fields = _Fields("error", body, "code message")
    return Failed(fields.text("code"), fields.text("message"))


def _bare(name: str, message: Message) -> Callable[[dict], Message]:
    def parse(body: dict) -> Message:
        _Fields(name, body, "")
        return message

    return parse


def _pull(body: dict) -> Pull:
    return Pull(_Fields("pull", body, "from_token").integer("from_token", 0, MAX_TOKENS))


def _ack(body: dict) -> Ack:
    return Ack(tuple(_Fields("ack", body, "chunks").integers("chunks", 1, MAX_WINDOW)))


def _end(body: dict) -> End:
    return End(_Fields("end", body, "trailer").binary("trailer", 0, MAX_TRAILER_BYTES))


_NAMES: dict[type, str] = {
    Claim: "claim",
    Admitted: "admitted",
    Pull: "pull",
    Renew: "renew",
    ChunkHeader: "chunk",
    Ack: "ack",
    End: "end",
    Done: "done",
    Released: "released",
    Cancel: "cancel",
    Failed: "error",
    SegmentOpened: "segment",
    Parked: "parked",
}
_PARSERS: dict[str, Callable[[dict], Message]] = {
    "claim": _claim,
    "admitted": _admitted,
    "pull": _pull,
    "renew": _bare("renew", Renew()),
    "chunk": _chunk,
    "ack": _ack,
    "end": _end,
    "done": _bare("done", Done()),
    "released": _bare("released", Released()),
    "cancel": _bare("cancel", Cancel()),
    "error": _failed,
    "segment": _segment,
    "parked": _parked,
}
