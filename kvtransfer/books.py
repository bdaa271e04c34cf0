"""What the transfers at one end have come to: counters by transport, and what is under way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvtransfer.endpoints import TRANSPORTS
from kvtransfer.errors import KVTransferError
from kvtransfer.transfer import ReleaseCause

NO_TRANSPORT = "none"
"""Where transfers are counted that ended before any transport had a part in them."""
WITHDRAWN = "withdrawn"
"""The cause at a source whose owner gave the transfer up."""
CANCELLED = "cancelled"
"""The cause at a sink that no longer wanted the transfer."""

COUNTED = (*TRANSPORTS, NO_TRANSPORT)
CAUSES = frozenset(
    {KVTransferError.code, *(error.code for error in KVTransferError.__subclasses__())}
    | {cause.value for cause in ReleaseCause if cause is not ReleaseCause.DONE}
    | {WITHDRAWN, CANCELLED}
)
"""Every cause that a failure can have."""


@dataclass(slots=True)
class TransferCounts:
    """One end's transfers by one transport, since its process began.

    Attributes:
        transfers: those that ended well; any other is in `failures`, by cause.
        chunks, bytes: payload sent, or taken in; bytes without padding.
        seconds: from the reader's pull to the end, or to where the transfer broke off, be it
            that the source was still computing.
        skipped_tokens: tokens that the reader had already, so that they did not travel.
        overlap_bytes, overlap_seconds: the part of `bytes` and `seconds` before all was
            computed; known to the source only.
        fallbacks: readers that went on to another endpoint after one of this transport failed.
        waiting: transfers admitted and not pulled, for want of room at the reader; now.
        reads: chunks asked of the owner and not sent; now, and of the source only.
    """

    transfers: int = 0
    chunks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    skipped_tokens: int = 0
    overlap_bytes: int = 0
    overlap_seconds: float = 0.0
    fallbacks: int = 0
    waiting: int = 0
    reads: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def failed(self, cause: str, count: int = 1) -> None:
        """So many transfers ended badly; `cause` is one of CAUSES."""
        self.failures[cause] = self.failures.get(cause, 0) + count


class TransferBooks:
    """The counters of one end. Of one event loop."""

    def __init__(self) -> None:
        self._counts: dict[str, TransferCounts] = {}

    def of(self, transport: str) -> TransferCounts:
        """The counters to add to; `transport` is one of COUNTED."""
        return self._counts.setdefault(transport, TransferCounts())

    def snapshot(self) -> dict[str, TransferCounts]:
        """A copy, by transport."""
        return {
            transport: replace(counts, failures=dict(counts.failures))
            for transport, counts in self._counts.items()
        }
