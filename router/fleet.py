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

_FIRST_ROWS = 64
COLUMNS = np.dtype(
    [
        ("roles", "i1"),  # 0: the row is nobody's
        ("spare_roles", "i1"),
        ("taking", "?"),  # not draining
        ("max_seqs", "f8"),
        ("num_blocks", "f8"),
        ("block_size", "f8"),
        # As the worker last told:
        ("waiting_tokens", "f8"),
        ("running", "f8"),  # sequences
        ("taken", "f8"),  # sequences that run or wait
        ("room", "f8"),  # blocks: free and cached
        ("export_limited", "?"),
        # As this router counts:
        ("sent_tokens", "f8"),
        ("sequences", "f8"),
        ("prefill_rate", "f8"),  # tokens/s
    ]
)


class Fleet:
    """A row for each open worker that is used; it keeps its row while it is open.

    Attributes:
        table: [rows] of COLUMNS.
        workers: [rows]; None where a row is nobody's.
        fingerprint: of the model that they serve, all the same; "" before the first.
    """

    def __init__(self) -> None:
        self.table = np.zeros(0, COLUMNS)
        self.workers: list[Worker | None] = []
        self.fingerprint = ""
        self.block_sizes: frozenset[int] = frozenset()
        self._free: list[int] = []
        self._groups: dict[tuple[int, int], Rows] = {}

    # ---- told ----

    def join(self, worker: Worker, info: WorkerInfo) -> int:
        """The row of a worker that is open from now on."""
        if not self._free:
            rows = len(self.table)
            more = max(rows, _FIRST_ROWS)
            self.table = np.concatenate([self.table, np.zeros(more, COLUMNS)])
            self.workers += [None] * more
            self._free += range(rows + more - 1, rows - 1, -1)
        row = self._free.pop()
        self.workers[row] = worker
        record: Any = self.table[row]
        record["roles"], record["spare_roles"] = info.roles.value, info.spare_roles.value
        limits = info.limits
        self.fingerprint = limits.fingerprint
        record["max_seqs"], record["num_blocks"] = limits.max_seqs, limits.num_blocks
        record["block_size"] = limits.block_size
        self._regroup()
        return row

    def leave(self, row: int) -> None:
        self.table[row] = np.zeros((), COLUMNS)
        self.workers[row] = None
        self._free.append(row)
        self._regroup()

    def loaded(self, row: int, load: Load, *, draining: bool) -> None:
        """What the worker of a row tells of its load."""
        record: Any = self.table[row]
        record["waiting_tokens"] = load.waiting_tokens
        record["running"] = load.running
        record["taken"] = load.running + load.waiting
        record["room"] = load.free_blocks + load.cached_blocks
        record["export_limited"] = load.export_limited
        if record["taking"] == draining:
            record["taking"] = not draining
            self._groups.clear()

    def counted(self, row: int, sent_tokens: int, sequences: int, prefill_rate: float) -> None:
        """What this router has in flight on the worker of a row."""
        record: Any = self.table[row]
        record["sent_tokens"], record["sequences"] = sent_tokens, sequences
        record["prefill_rate"] = prefill_rate

    def _regroup(self) -> None:
        self._groups.clear()
        sizes = self.table["block_size"][self.table["roles"] > 0]
        self.block_sizes = frozenset(int(size) for size in np.unique(sizes))

    # ---- asked ----

    def worker(self, row: int) -> Worker:
        """The worker of a row that is somebody's."""
        worker = self.workers[row]
        assert worker is not None
        return worker

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
