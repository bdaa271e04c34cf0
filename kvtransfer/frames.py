"""Frames: a u32 header length (little endian), a msgpack header, raw payload bytes.

gRPC sends one frame per message with its payload behind the header; where the payload stays in
shared memory (shm) or on the devices (jax), frames are headers only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import msgpack

from kvtransfer.errors import ProtocolError
from kvtransfer.messages import MAX_TRAILER_BYTES, ChunkHeader, Message, from_header, to_header

PREFIX = struct.Struct("<I")
MAX_HEADER_BYTES = MAX_TRAILER_BYTES + (64 << 10)
MAX_PAYLOAD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """A received message and, for a chunk, one read-only buffer or device array per array.

    Buffers are valid until the chunk is acknowledged.
    """

    message: Message
    payload: tuple[Any, ...] = ()


def encode_header(message: Message) -> bytes:
    """Length prefix and msgpack header of `message`: its frame, but for a payload."""
    header: bytes = msgpack.packb(to_header(message))
    return PREFIX.pack(len(header)) + header


def header_length(prefix: bytes | memoryview) -> int:
    """Bytes of the header behind a 4-byte prefix. Raises ProtocolError if oversized."""
    (length,) = PREFIX.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
    return int(length)


def decode_header(header: bytes | memoryview) -> Message:
    """The message in a msgpack header. Raises ProtocolError and nothing else."""
    try:
        fields: Any = msgpack.unpackb(header, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"header is not msgpack: {str(error)[:200]}") from None
    return from_header(fields)


def decode_bare(data: bytes) -> Message:
    """The inverse of `encode_header`, of a frame without payload. Raises ProtocolError only."""
    if len(data) < PREFIX.size or len(data) != PREFIX.size + header_length(data[: PREFIX.size]):
        raise ProtocolError(f"frame of {len(data)} bytes is not its header alone")
    return decode_header(data[PREFIX.size :])


def decode_frame(data: bytes) -> Frame:
    """The frame, its payload views of `data`. Raises ProtocolError and nothing else."""
    view = memoryview(data)
    if len(view) < PREFIX.size:
        raise ProtocolError(f"frame of {len(view)} bytes is cut off")
    body = PREFIX.size + header_length(view[: PREFIX.size])
    if len(view) < body:
        raise ProtocolError(f"frame of {len(view)} bytes is cut off; its header ends at {body}")
    message = decode_header(view[PREFIX.size : body])
    sizes = [a.nbytes for a in message.arrays] if isinstance(message, ChunkHeader) else []
    if sum(sizes) != len(view) - body:
        raise ProtocolError(f"payload of {len(view) - body} bytes; its header says {sum(sizes)}")
    payload = []
    for size in sizes:
        payload.append(view[body : body + size])
        body += size
    return Frame(message, tuple(payload))
