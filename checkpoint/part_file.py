"""A file that arrives in parts, in any order, and survives a broken download."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PART_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [begin, end) of a file."""

    index: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class PartFile:
    """The file `path`, until it is whole: beside it, under a name with its `version`.

    A second hidden file lists the parts that have arrived. What belongs to another version is
    removed. `write` may be called by many threads.

    Attributes:
        missing: the parts that were not there at first.
    """

    def __init__(self, path: Path, size: int, version: str, part_bytes: int = PART_BYTES) -> None:
        """Raises OSError: the folder cannot be written."""
        self.path = path
        self.size = size
        hidden = f".{path.name}."
        self._data = path.parent / f"{hidden}{version}.part"
        self._arrived = path.parent / f"{hidden}{version}.arrived"
        for old in path.parent.iterdir():
            ours = old.name.startswith(hidden) and old.suffix in (".part", ".arrived")
            if ours and old not in (self._data, self._arrived):
                old.unlink()
        self._lock = threading.Lock()
        parts = [
            Part(index, begin, min(begin + part_bytes, size))
            for index, begin in enumerate(range(0, size, part_bytes))
        ]
        done = self._read_arrived(part_bytes)
        self.missing = [part for part in parts if part.index not in done]
        with self._data.open("ab") as file:
            file.truncate(size)
        self._arrived.write_text("".join(f"{line}\n" for line in (part_bytes, *sorted(done))))

    def _read_arrived(self, part_bytes: int) -> set[int]:
        """Indices of the parts that are there; none where anything is odd."""
        try:
            first, *rest = self._arrived.read_text().split()
            whole = self._data.stat().st_size == self.size and int(first) == part_bytes
            return {int(index) for index in rest} if whole else set()
        except (FileNotFoundError, ValueError):
            return set()

    def write(self, part: Part, data: bytes) -> None:
        """Put a part's bytes where they belong.

        Raises:
            OSError: `data` is not as long as the part, or cannot be written.
        """
        if len(data) != part.size:
            raise OSError(f"{self.path.name}: {len(data)} bytes came of {part.size}")
        with self._data.open("r+b") as file:
            file.seek(part.begin)
            file.write(data)
        with self._lock, self._arrived.open("a") as file:
            file.write(f"{part.index}\n")

    def pieces(self) -> Iterator[bytes]:
        """The file's bytes, to be checked before `finish`."""
        with self._data.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece

    def finish(self) -> None:
        """Give the whole file its name."""
        os.replace(self._data, self.path)
        self._arrived.unlink()

    def discard(self) -> None:
        """Forget all parts."""
        self._data.unlink()
        self._arrived.unlink()
