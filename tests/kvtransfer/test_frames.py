"""The codec takes any bytes and answers with a message or a ProtocolError."""

from __future__ import annotations

from contextlib import suppress

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer import ArraySpec, KVLayout, ProtocolError
from kvtransfer.frames import (
    MAX_HEADER_BYTES,
    PREFIX,
    decode_bare,
    decode_frame,
    decode_header,
    encode_header,
    header_length,
)
from kvtransfer.messages import (
    MAX_TOKENS,
    PROTOCOL_VERSION,
    Ack,
    Admitted,
    ArrayHeader,
    Cancel,
    ChunkHeader,
    Claim,
    Done,
    End,
    Failed,
    Parked,
    Pull,
    Renew,
    SegmentOpened,
    to_header,
)

LAYOUT = KVLayout("m", (ArraySpec("k", "bfloat16", 2, 3, 4),))
CHUNK = ChunkHeader(
    1, 0, 8, 16, (0, 2), (0, 3), (ArrayHeader("k", "int8", (2, 8, 3, 4), 5),), 2**64 - 1
)
MESSAGES = [
    Claim(PROTOCOL_VERSION, b"id", 7, LAYOUT),
    Admitted(100, 4),
    Pull(3),
    Renew(),
    CHUNK,
    Ack((8,)),
    End(b"\x00\xff"),
    Done(),
    Cancel(),
    Failed("aborted", "why"),
    SegmentOpened(4, 4096),
    Parked(2**63 - 1, "10.0.0.1:4711", 2, 12),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message):
    payload = [memoryview(b"12345")] if message is CHUNK else []
    frame = decode_frame(b"".join((encode_header(message), *payload)))
    assert frame.message == message
    assert [bytes(view) for view in frame.payload] == [bytes(view) for view in payload]
    alone = encode_header(message)
    assert decode_bare(alone) == message
    for wrong in (alone[:-1], alone + b"\0", alone[:3]):
        with pytest.raises(ProtocolError):
            decode_bare(wrong)


# A busy machine is no failure.
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
scalar = (
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
plain = (
    scalar | st.lists(scalar, max_size=4) | st.dictionaries(st.text(max_size=3), scalar, max_size=3)
)


@relaxed
@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data):
    for decode in (decode_frame, decode_header, decode_bare):
        with pytest.raises(ProtocolError):
            decode(data)


@relaxed
@given(st.sampled_from(MESSAGES), st.data())
def test_a_header_with_one_wrong_value_never_raises_anything_else(message, data):
    header = to_header(message)
    where = header
    while True:  # any value of the map, at any depth
        key = data.draw(st.sampled_from(sorted(where)))
        inner = where[key]
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0]
        if not isinstance(inner, dict) or data.draw(st.booleans()):
            break
        where = inner
    if data.draw(st.booleans()):
        where[key] = data.draw(plain)
    else:
        del where[key]
    packed = msgpack.packb(header)
    with suppress(ProtocolError):
        decode_header(packed)


@relaxed
@given(st.sampled_from(MESSAGES), st.data())
def test_cut_off_or_flipped_frames(message, data):
    whole = encode_header(message) + (b"12345" if message is CHUNK else b"")
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError):
        decode_frame(whole[:cut])
    flipped = bytearray(whole)
    flipped[cut] ^= data.draw(st.integers(1, 255))
    with suppress(ProtocolError):
        decode_frame(bytes(flipped))


def test_oversized_header():
    with pytest.raises(ProtocolError, match="at most"):
        header_length(PREFIX.pack(MAX_HEADER_BYTES + 1))


def test_payload_must_be_what_the_header_says():
    with pytest.raises(ProtocolError, match="payload of 4 bytes"):
        decode_frame(encode_header(CHUNK) + b"1234")
    with pytest.raises(ProtocolError, match="payload of 1 bytes"):
        decode_frame(encode_header(Done()) + b"x")


@pytest.mark.parametrize(
    ("message", "field", "value", "says"),
    [
        (MESSAGES[0], "version", 1, "version 1"),
        (MESSAGES[0], "transfer_id", b"", "transfer_id"),
        (MESSAGES[0], "transfer_id", b"x" * 65, "transfer_id"),
        (MESSAGES[0], "from_token", -1, "from_token"),
        (MESSAGES[0], "from_token", True, "from_token"),
        (MESSAGES[1], "tokens", MAX_TOKENS + 1, "tokens"),
        (CHUNK, "stop", 8, "stop"),
        (CHUNK, "layers", [2, 2], "layers"),
        (CHUNK, "arrays", [], "arrays"),
        (CHUNK, "extra", 1, "extra"),
        (Done(), "type", "gone", "gone"),
        (Done(), "type", [1], "unknown message type"),
    ],
)
def test_errors_name_what_is_wrong(message, field, value, says):
    with pytest.raises(ProtocolError, match=says):
        decode_header(msgpack.packb({**to_header(message), field: value}))


@pytest.mark.parametrize("dtype", ["object", "nonsense", "O", ""])
def test_a_layout_from_the_wire_has_known_dtypes(dtype):
    header = to_header(MESSAGES[0])
    header["layout"]["arrays"][0]["dtype"] = dtype
    with pytest.raises(ProtocolError, match="unknown dtype"):
        decode_header(msgpack.packb(header))


def test_header_prefix():
    data = encode_header(Done())
    assert header_length(data[:4]) == len(data) - 4
