"""The choices of one prompt go to the same workers, so that it is computed and fetched once.

Each is an attempt of its own. The first is placed with all of them in mind, and the others follow
it while its decode worker can hold more. The next after that is placed anew, with the same prefill
worker if possible, and followed in its turn: so each worker has the prompt once. Where a worker
is lost, the first choice that comes back finds new ones, and the others follow it there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.types import Role
from protos.codec import GROUP_BYTES
from router.fleet import Fleet, Rows
from router.policy import Ask, seats
from router.worker import Worker

WorkerRoles = tuple[tuple[Worker, Role], ...]


class Siblings:
    """What the choices of one prompt know of each other.

    Attributes:
        group: names them to workers; random, so that no other request can name it.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        """`count` choices of `prompt`."""
        self.group = secrets.token_bytes(GROUP_BYTES)
        self._shared = len(prompt) - 1  # each needs the logits of the last token for itself
        self._count = self._unplaced = count
        self._followed: WorkerRoles = ()
        self._seats = 0  # how many more may follow
        self._having: set[Worker] = set()  # who have been given the prompt
        self._echo: dict[str, list[Any]] = {}
        self._echoed = asyncio.Event()

    def tell_echo(self, echo: dict[str, list[Any]]) -> None:
        """The first choice has the log-probabilities of the prompt, as the answer has them."""
        self._echo = echo
        self._echoed.set()

    async def echo(self) -> dict[str, list[Any]]:
        """They are the same for all choices: the others do not compute them. Not to be changed."""
        await self._echoed.wait()
        return self._echo

    def ask(self, fleet: Fleet, tokens: int, cached: npt.NDArray[np.int64]) -> Ask:
        """What to choose workers by for one that does not `follow`; see Ask."""
        cached = cached.copy()
        for row in self._rows(fleet):
            cached[row] = max(cached[row], self._whole(int(fleet.table["block_size"][row])))
        return Ask(tokens, cached, self._unplaced, self._shared)

    def those_having(self, fleet: Fleet, rows: Rows) -> Rows:
        """Those of `rows` that have been given the prompt; all of them where none has."""
        having = rows[np.isin(rows, self._rows(fleet))]
        return having if len(having) else rows

    def placed(self, fleet: Fleet, workers: WorkerRoles, ask: Ask) -> None:
        """One that has not followed goes to `workers`; `ask` is what they were chosen by."""
        self._followed = workers
        self._having.update(worker for worker, _ in workers)
        self._unplaced = max(1, self._unplaced - 1)
        last, roles = workers[-1]
        assert last.row is not None
        decodes = Role.DECODE in roles
        self._seats = seats(fleet, last.row, ask) - 1 if decodes else self._count

    def follow(
        self, fleet: Fleet, refusing: Collection[Worker], *, only_first: bool
    ) -> WorkerRoles | None:
        """The workers of the one before, if they take another; see router.placement.place."""
        if any(worker in refusing or not fleet.takes(worker) for worker, _ in self._followed):
            self._followed = ()
            self._unplaced = self._count  # all that were there come back
        roles = [roles for _, roles in self._followed]
        if not roles or self._seats < 1 or (roles[-1] is Role.PREFILL) != only_first:
            return None
        self._seats -= 1
        self._unplaced = max(1, self._unplaced - 1)
        return self._followed

    def uncached(self, workers: WorkerRoles, tokens: int) -> int:
        """How many of `tokens` one that follows has to compute."""
        return tokens - self._whole(workers[0][0].info.limits.block_size)

    def _whole(self, block_size: int) -> int:
        return self._shared // block_size * block_size

    def _rows(self, fleet: Fleet) -> list[int]:
        return [each.row for each in self._having if each.row is not None and fleet.takes(each)]
