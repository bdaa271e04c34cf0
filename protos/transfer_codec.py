"""The counters of a worker's KV transfers ↔ wire messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from engine.types import Role
from kvtransfer.books import CAUSES, COUNTED, TransferCounts
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
    """The inverse of `encode_transfers`; takes names that this version knows, each once.

    Raises:
        WireError: an end, a transport or a cause that there is not, or one that repeats.
    """
    transfers: dict[tuple[Role, str], TransferCounts] = {}
    for message in messages:
        if message.roles not in (Role.PREFILL.value, Role.DECODE.value):
            raise WireError(f"roles={message.roles} are no end of a transfer")
        key = Role(message.roles), message.transport
        if message.transport not in COUNTED or key in transfers:
            raise WireError(f"transport {message.transport[:32]!r} is unknown or repeats")
        if not message.failures.keys() <= CAUSES:
            raise WireError("a transfer failed by a cause that is unknown")
        seconds = message.seconds, message.overlap_seconds
        if not all(0 <= value < math.inf for value in seconds):
            raise WireError(f"transfers took {seconds} seconds")
        numbers = {name: getattr(message, name) for name in _NUMBERS}
        transfers[key] = TransferCounts(**numbers, failures=dict(message.failures))
    return transfers
