"""Messages of sessions that were dropped, at routers' ends and at workers'."""

from __future__ import annotations


class Drops:
    """Counts that never go back, whichever worker ends or begins anew.

    Attributes:
        late: tokens of attempts that had ended here; a few come with every client that leaves.
        by_workers: what workers had no use for, as they tell it.
    """

    def __init__(self) -> None:
        self.late = 0
        self.by_workers = 0
        self._told: dict[str, tuple[int, int]] = {}  # address → epoch, what it told last

    def take(self, address: str, epoch: int, count: int) -> None:
        """A worker's counter since its start; `epoch` is new for every process at that address."""
        known_epoch, known = self._told.get(address, (epoch, 0))
        self.by_workers += max(0, count - known) if known_epoch == epoch else count
        self._told[address] = epoch, count
