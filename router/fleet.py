"""What is weighed of each open worker, in arrays, so that a choice loops over no workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.types import Load, Role
from protos.codec import WorkerInfo

if TYPE_CHECKING:
    from router.worker import Worker

Rows = npt.NDArray[np.intp]

DEFAULT_PREFILL_RATE = 4000.0
"""Tokens/s of every worker before any has computed a prompt."""
_FIRST_ROWS = 64
_COLUMNS: dict[str, tuple[str, float]] = {
    "roles": ("i1", 0),  # 0: the row is nobody's
    "spare_roles": ("i1", 0),
    "siblings": ("?", 1),  # the choices of a prompt share its KV
    "taking": ("?", 0),  # not draining
    "max_seqs": ("f8", 1),
    "num_blocks": ("f8", 1),
    "block_size": ("f8", 1),
    # As the worker last told:
    "waiting_tokens": ("f8", 0),
    "running": ("f8", 0),  # sequences
    "taken": ("f8", 0),  # sequences that run or wait
    "room": ("f8", 0),  # blocks: free and cached
    "export_limited": ("?", 0),
    # As this router counts:
    "sent_tokens": ("f8", 0),
    "sequences": ("f8", 0),
    "prefill_rate": ("f8", 1),  # tokens/s, supposed where it is not
    "rated": ("?", 0),
}
"""Column → dtype, and what stands in it where the row is nobody's: costs divide by some."""


class Fleet:
    """A row for each open worker that is used; it keeps its row while it is open.

    Attributes:
        table: column → array [rows]; an array each, as costs read few columns of all rows.
        workers: [rows]; None where a row is nobody's.
        fingerprint: of the model that they serve, all the same; "" before the first.
        siblings: the choices of a prompt share its KV on all of them.
    """

    def __init__(self) -> None:
        self.table: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(0, kind) for name, (kind, _) in _COLUMNS.items()
        }
        self.workers: list[Worker | None] = []
        self.fingerprint = ""
        self.block_sizes: frozenset[int] = frozenset()
        self.siblings = True
        self._free: list[int] = []
        self._groups: dict[tuple[int, int], Rows] = {}

    # ---- told ----

    def join(self, worker: Worker, info: WorkerInfo) -> int:
        """The row of a worker that is open from now on."""
        if not self._free:
            rows = self.rows
            more = max(rows, _FIRST_ROWS)
            for name, (_, nobody) in _COLUMNS.items():
                self.table[name] = np.pad(self.table[name], (0, more), constant_values=nobody)
            self.workers += [None] * more
            self._free += range(rows + more - 1, rows - 1, -1)
        row = self._free.pop()
        self.workers[row] = worker
        table, limits = self.table, info.limits
        self.fingerprint = limits.fingerprint
        table["roles"][row], table["spare_roles"][row] = info.roles.value, info.spare_roles.value
        table["max_seqs"][row], table["num_blocks"][row] = limits.max_seqs, limits.num_blocks
        table["block_size"][row], table["siblings"][row] = limits.block_size, info.siblings
        self._regroup()
        self._suppose_rates()
        return row

    def leave(self, row: int) -> None:
        for name, (_, nobody) in _COLUMNS.items():
            self.table[name][row] = nobody
        self.workers[row] = None
        self._free.append(row)
        self._regroup()

    def loaded(self, row: int, load: Load, *, draining: bool) -> None:
        """What the worker of a row tells of its load."""
        table = self.table
        table["waiting_tokens"][row] = load.waiting_tokens
        table["running"][row] = load.running
        table["taken"][row] = load.running + load.waiting
        table["room"][row] = load.free_blocks + load.cached_blocks
        table["export_limited"][row] = load.export_limited
        if table["taking"][row] == draining:
            table["taking"][row] = not draining
            self._groups.clear()

    def counted(
        self, row: int, sent_tokens: int, sequences: int, prefill_rate: float | None
    ) -> None:
        """What this router has in flight on the worker of a row.

        One whose `prefill_rate` is not known yet is supposed to be as fast as the others.
        """
        table = self.table
        table["sent_tokens"][row], table["sequences"][row] = sent_tokens, sequences
        rated = prefill_rate is not None
        if rated != table["rated"][row] or (rated and prefill_rate != table["prefill_rate"][row]):
            table["rated"][row] = rated
            if rated:
                table["prefill_rate"][row] = prefill_rate
            self._suppose_rates()

    def _suppose_rates(self) -> None:
        rates, rated = self.table["prefill_rate"], self.table["rated"]
        unrated = (self.table["roles"] > 0) & ~rated
        if unrated.any():
            rates[unrated] = rates[rated].mean() if rated.any() else DEFAULT_PREFILL_RATE

    def _regroup(self) -> None:
        self._groups.clear()
        self.siblings = bool(self.table["siblings"].all())
        sizes = self.table["block_size"][self.table["roles"] > 0]
        self.block_sizes = frozenset(int(size) for size in np.unique(sizes))

    # ---- asked ----

    @property
    def rows(self) -> int:
        """How many there are, with those that are nobody's."""
        return len(self.workers)

    def worker(self, row: int) -> Worker:
        """The worker of a row that is somebody's."""
        worker = self.workers[row]
        assert worker is not None
        return worker

    def takes(self, worker: Worker) -> bool:
        """It is open, used, and takes new work."""
        row = worker.row
        return row is not None and self.workers[row] is worker and bool(self.table["taking"][row])

    def taking(self, roles: Role) -> Rows:
        """Workers that do exactly `roles` and take new work."""
        return self._grouped((roles.value, 0))

    @property
    def standing_in(self) -> Rows:
        """Decode workers that take new work and can prefill as well."""
        return self._grouped((Role.DECODE.value, Role.PREFILL.value))

    def _grouped(self, key: tuple[int, int]) -> Rows:
        rows = self._groups.get(key)
        if rows is None:
            roles, spare = key
            table = self.table
            able = (table["roles"] == roles) & (table["spare_roles"] & spare == spare)
            rows = self._groups[key] = np.flatnonzero(able & table["taking"])
        return rows
