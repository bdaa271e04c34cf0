"""KV copies that wait for a step: reads of what is exported, writes of what is imported."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from engine.events import Event, KVRead, KVWritten, ReadKV, WriteKV
from engine.layer_groups import LayerGroup
from engine.plan import ExportKV, ImportKV
from engine.sequence import Sequence


class CopyQueue:
    """Copies in the order they were asked for, each with the sequence whose blocks it names.

    A sequence must be dropped here before its blocks go back to the pool.
    """

    def __init__(self, groups: tuple[LayerGroup, ...]) -> None:
        self._groups = groups
        self._reads: deque[tuple[ReadKV, Sequence]] = deque()
        self._writes: deque[tuple[WriteKV, Sequence]] = deque()

    def __bool__(self) -> bool:
        return bool(self._reads or self._writes)

    @property
    def reads(self) -> int:
        return len(self._reads)

    def read(self, command: ReadKV, sequence: Sequence) -> None:
        self._reads.append((command, sequence))

    def write(self, command: WriteKV, sequence: Sequence) -> None:
        self._writes.append((command, sequence))

    def drop(self, sequence: Sequence) -> list[Event]:
        """Forget the copies of `sequence`; returns the answers that their askers are due."""
        answers: list[Event] = []
        reads, writes = self._reads, self._writes
        self._reads, self._writes = deque(), deque()
        for read in reads:
            if read[1] is sequence:
                answers.append(KVRead(read[0].read_id, None))
            else:
                self._reads.append(read)
        for write in writes:
            if write[1] is sequence:
                answers.append(KVWritten(write[0].import_id, ok=False))
            else:
                self._writes.append(write)
        return answers

    def take_exports(self, most: int, step: int) -> Iterator[ExportKV]:
        """At most `most`, for step number `step`."""
        for _ in range(min(most, len(self._reads))):
            read, sequence = self._reads.popleft()
            sequence.last_step = step
            slots, windowed = self._slots(sequence, read)
            yield ExportKV(
                read.read_id, read.start, read.stop, slots, read.on_device, read.windowed, windowed
            )

    def take_imports(self, most: int, step: int) -> Iterator[ImportKV]:
        """At most `most`, for step number `step`."""
        for _ in range(min(most, len(self._writes))):
            write, sequence = self._writes.popleft()
            sequence.last_step = step
            slots, windowed = self._slots(sequence, write)
            yield ImportKV(
                write.import_id, write.start, slots, write.arrays, write.windowed, windowed
            )

    def check_owners(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError when a copy names a sequence that is not among `sequences`."""
        alive = {id(sequence) for sequence in sequences}
        for command, sequence in (*self._reads, *self._writes):
            assert id(sequence) in alive, f"{command} has no sequence any more"

    def possible(self, command: ReadKV | WriteKV, sequence: Sequence) -> bool:
        """Whether the sequence still has all the blocks that the command names."""
        return all(
            command.start // group.pool.block_size >= sequence.given_back
            for group in self._named(command)
            if group.reach is not None
        )

    def _named(self, command: ReadKV | WriteKV) -> tuple[LayerGroup, ...]:
        return self._groups if command.windowed else self._groups[:1]

    def _slots(
        self, sequence: Sequence, command: ReadKV | WriteKV
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Pool slots of the command's tokens, block * block_size + offset, int32; and those of
        windowed layers in a pool of their own, if these are named."""
        positions = np.arange(command.start, command.stop, dtype=np.int32)
        slots: list[np.ndarray | None] = [
            sequence.tables[group.index][positions // group.pool.block_size] * group.pool.block_size
            + positions % group.pool.block_size
            for group in self._named(command)
        ]
        first, second = (*slots, None)[:2]
        assert first is not None
        return first, second
