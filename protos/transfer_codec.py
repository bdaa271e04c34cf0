"""The counters of a worker's KV transfers ↔ wire messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from engine.types import Role
from kvtransfer.books import CAUSES, COUNTED, TransferCounts
from kvtransfer.errors import KVTransferError
from protos import worker_pb2 as wire
from protos.errors import WireError

Transfers = Mapping[tuple[Role, str], TransferCounts]
"""(PREFILL for the sending end or DECODE for the receiving one, transport) → its counters."""

_NUMBERS = tuple(name for name in TransferCounts.__dataclass_fields__ if name != "failures")


def encode_transfers(transfers: Transfers) -> Iterator[wire.TransferCounts]:
    for (role, transport), counts in transfers.items():
        yield wire.TransferCounts(
            transport=transport,
            roles=role.value,
            failures=counts.failures,
            **{name: getattr(counts, name) for name in _NUMBERS},
        )


def decode_transfers(messages: Iterable[wire.TransferCounts]) -> Transfers:
    """The inverse of `encode_transfers`, but for names that only a later version knows: its
    transports are left out, its causes count as "failed".

    Raises:
        WireError: an end that there is not, or a transport that repeats.
    """
    transfers: dict[tuple[Role, str], TransferCounts] = {}
    for message in messages:
        if message.roles not in (Role.PREFILL.value, Role.DECODE.value):
            raise WireError(f"roles={message.roles} are no end of a transfer")
        key = Role(message.roles), message.transport
        if message.transport not in COUNTED:
            continue
        if key in transfers:
            raise WireError(f"transport {message.transport!r} repeats")
        seconds = message.seconds, message.overlap_seconds
        if not all(0 <= value < math.inf for value in seconds):
            raise WireError(f"transfers took {seconds} seconds")
        numbers = {name: getattr(message, name) for name in _NUMBERS}
        transfers[key] = TransferCounts(**numbers)
        for cause, count in message.failures.items():
            transfers[key].failed(cause if cause in CAUSES else KVTransferError.code, count)
    return transfers
