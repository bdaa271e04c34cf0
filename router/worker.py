"""One open worker, as the router knows it."""

from __future__ import annotations

from typing import Protocol

from engine.types import AttemptId, Load
from protos.codec import StartOrder, WorkerInfo
from router.fleet import Fleet
from router.in_flight import InFlight, PrefillRate


class Session(Protocol):
    """What a worker is spoken to by; see protos.session_client.WorkerSession."""

    address: str
    load: Load
    draining: bool

    def start(self, order: StartOrder) -> None: ...

    def abort(self, attempt: AttemptId) -> None: ...

    def resync(self) -> None: ...


class Worker(InFlight):
    """An open session with a worker, and what this router has in flight there.

    Attributes:
        row: its row in the fleet, which mirrors its load and counts; None once it is lost.
    """

    def __init__(
        self, session: Session, info: WorkerInfo, fleet: Fleet, rate: PrefillRate | None = None
    ) -> None:
        """`rate`: of its prefills, as far as it is known from sessions before."""
        super().__init__(rate=rate)
        self.info = info
        self._session = session
        self._fleet = fleet
        self.row: int | None = fleet.join(self, info)
        self.told()

    @property
    def address(self) -> str:
        return self._session.address

    @property
    def load(self) -> Load:
        return self._session.load

    @property
    def draining(self) -> bool:
        return self._session.draining

    def start(self, order: StartOrder) -> None:
        self._session.start(order)

    def abort(self, attempt: AttemptId) -> None:
        self._session.abort(attempt)

    def resync(self) -> None:
        """Ask for a snapshot of its cached blocks."""
        self._session.resync()

    def told(self) -> None:
        """Its session has new load."""
        if self.row is not None:
            self._fleet.loaded(self.row, self.load, draining=self.draining)
            self._changed()  # the rate may be forgotten by now

    def leave(self) -> None:
        """It is lost; attempts that end later are not counted anywhere."""
        if self.row is not None:
            self._fleet.leave(self.row)
        self.row = None

    def _changed(self) -> None:
        if self.row is not None:
            self._fleet.counted(self.row, self.prefill_tokens, self.sequences, self.rate.value)
