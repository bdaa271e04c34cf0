"""What the source knows about one offered transfer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.session import Session


class ReleaseCause(Enum):
    """Why the source gave a transfer back to its owner."""

    DONE = "done"
    """The reader confirmed that it has everything."""
    LEASE_EXPIRED = "lease_expired"
    """Nobody claimed it, or its reader stood still for longer than the lease."""
    READER_LOST = "reader_lost"
    """The reader cancelled, broke the protocol, or its connection broke."""
    FAILED = "failed"
    """This end could not go on: `read` raised, or there was no shared memory."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Facts set by the owner (None: not yet), the session that serves it, and its lease."""

    transfer_id: bytes
    total: int | None = None
    computed: int = 0  # KV of tokens [0, computed) may be read
    trailer: bytes | None = None
    finished_at: float = 0.0  # by time.monotonic; counts once there is a trailer
    session: Session | None = None
    deadline: float = 0.0  # loop time at which the lease runs out; counts once `lease` is set
    lease: asyncio.TimerHandle | None = None
