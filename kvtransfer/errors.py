"""Everything that can go wrong with a transfer, as one tree.

    KVTransferError
    ├── SourceUnreachable   no endpoint answered, or the connection broke
    ├── ProtocolError       the peer broke the protocol, or speaks another version
    ├── LayoutMismatch      the two ends hold KV of another model, dtype or shape
    ├── UnknownTransfer     the source was never offered this transfer, or it is over
    ├── IntegrityError      a chunk is not the one expected, or its checksum is wrong
    ├── TransferAborted     the source gave the transfer up; its message says why
    ├── TransferNotNeeded   the request has ended without its KV: no failure of anyone
    ├── TransferTimeout     one end waited for the other longer than allowed
    └── SharedMemoryFull    the source found no memory for the shared segment

Each class has a `code`, its name on the wire: what a source raises or reports arrives at
the sink as the same class with the same message.
"""

from __future__ import annotations

from typing import ClassVar


class KVTransferError(Exception):
    """A transfer failed. The worker goes on; the request fails or is prefilled again."""

    code: ClassVar[str] = "failed"


class SourceUnreachable(KVTransferError):
    code = "unreachable"


class ProtocolError(KVTransferError):
    code = "protocol"


class LayoutMismatch(KVTransferError):
    code = "layout_mismatch"


class UnknownTransfer(KVTransferError):
    code = "unknown_transfer"


class IntegrityError(KVTransferError):
    code = "integrity"


class TransferAborted(KVTransferError):
    code = "aborted"


class TransferNotNeeded(KVTransferError):
    code = "not_needed"


class TransferTimeout(KVTransferError):
    code = "timeout"


class SharedMemoryFull(KVTransferError):
    code = "memory_full"


_BY_CODE: dict[str, type[KVTransferError]] = {
    error.code: error for error in KVTransferError.__subclasses__()
}


def error_from_wire(code: str, message: str) -> KVTransferError:
    """The exception that a peer's error message stands for."""
    error = _BY_CODE.get(code)
    return error(message) if error else TransferAborted(f"{code}: {message}")
