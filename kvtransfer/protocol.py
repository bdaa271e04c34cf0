"""The transfer protocol: one connection moves one transfer at a time, in these states.

Both ends follow the same table. `→` is sent by the reader (decode), `←` by the source
(prefill); a message that the table lacks for the present state is a ProtocolError, which
ends the connection and nothing else. The states' names are also those of fault points.

    state       message              next        meaning
    connected   → claim              claimed     reader names the transfer and its layout
    claimed     ← admitted           admitted    source has reserved blocks; reader may do so
    admitted    → pull               streaming   reader has room
    streaming   ← chunk              streaming   at most `window` of them not yet acknowledged
    streaming   → ack                streaming   a chunk's memory may be used again
    streaming   ← end                ended       last chunk is out; carries the trailer
    ended       → ack                ended
    ended       → done               done        reader has everything
    done        ← released           released    source has released its blocks
    any before done
                → cancel, or the connection breaks
                                     cancelled
                ← error              failed      the owner withdrew, the lease expired, ...;
                                                 no failure to a reader that has everything
    claimed, admitted, streaming, ended
                → renew              unchanged   renews the lease while the reader has no room
    streaming, ended
                → pull               unchanged   repeated: ignored

A reader whose connection breaks in `claimed`, unanswered, may claim once more by another
endpoint; later the transfer is lost with its connection.

A claim may come before the source knows the transfer: it then waits in `claimed`. The
source's lease starts when the owner has computed everything and is renewed by each pull,
ack and renew; it never runs while the source itself is at work.
"""

from __future__ import annotations

from enum import Enum

from kvtransfer.errors import ProtocolError
from kvtransfer.messages import (
    Ack,
    Admitted,
    Cancel,
    ChunkHeader,
    Claim,
    Done,
    End,
    Failed,
    Message,
    Pull,
    Released,
    Renew,
)


class State(Enum):
    """Where a connection stands; see the module's table."""

    CONNECTED = "connected"
    CLAIMED = "claimed"
    ADMITTED = "admitted"
    STREAMING = "streaming"
    ENDED = "ended"
    DONE = "done"
    RELEASED = "released"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Nothing follows, but for `released` after `done`."""
        return self in (State.DONE, State.RELEASED, State.CANCELLED, State.FAILED)


TRANSITIONS: dict[tuple[State, type[Message]], State] = {
    (State.CONNECTED, Claim): State.CLAIMED,
    (State.CLAIMED, Admitted): State.ADMITTED,
    (State.ADMITTED, Pull): State.STREAMING,
    (State.STREAMING, ChunkHeader): State.STREAMING,
    (State.STREAMING, Ack): State.STREAMING,
    (State.STREAMING, End): State.ENDED,
    (State.ENDED, Ack): State.ENDED,
    (State.ENDED, Done): State.DONE,
    (State.DONE, Released): State.RELEASED,
    (State.STREAMING, Pull): State.STREAMING,
    (State.ENDED, Pull): State.ENDED,
}
for _state in State:
    if not _state.over:
        TRANSITIONS[_state, Cancel] = State.CANCELLED
        TRANSITIONS[_state, Failed] = State.FAILED
        if _state is not State.CONNECTED:
            TRANSITIONS[_state, Renew] = _state

FROM_SOURCE: tuple[type[Message], ...] = (Admitted, ChunkHeader, End, Failed, Released)
FROM_READER: tuple[type[Message], ...] = (Claim, Pull, Ack, Renew, Done, Cancel)


def next_state(state: State, message: Message) -> State:
    """The state after `message`. Raises ProtocolError if the table has no such transition."""
    try:
        return TRANSITIONS[state, type(message)]
    except KeyError:
        raise ProtocolError(
            f"{type(message).__name__} is not allowed in state {state.value!r}"
        ) from None
