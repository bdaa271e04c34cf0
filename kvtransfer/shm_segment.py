"""Shared memory of one connection: an anonymous file of slots, each one chunk long.

The file has no name, so nothing is left behind whoever dies, and it is reserved in full
before use, so that a full memory is an error here instead of a SIGBUS later.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

from kvtransfer.errors import ProtocolError, SharedMemoryFull


class Segment:
    """The source's writable side. Raises SharedMemoryFull if memory cannot be reserved."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        size = slots * slot_bytes
        self.fd = os.memfd_create("hexserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            os.close(self.fd)
            raise SharedMemoryFull(
                f"no shared memory for {slots} chunks of {slot_bytes} bytes: {error.strerror}"
            ) from error

    def slot(self, index: int) -> memoryview:
        """The slot's bytes. To be dropped before `close`."""
        start = index * self.slot_bytes
        return memoryview(self._map)[start : start + self.slot_bytes]

    def close(self) -> None:
        """Gives the memory back, once the reader has unmapped it as well."""
        os.close(self.fd)
        # A view still held (by a traceback, say) keeps the mapping until it goes.
        with suppress(BufferError):
            self._map.close()


class SegmentPool:
    """Keeps segments that nobody reads any more: reserving and clearing memory is slow.

    A segment whose reader may still look at it must be closed instead, or that reader
    would see another transfer's KV.
    """

    def __init__(self, slots: int, slot_bytes: int, keep: int) -> None:
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._keep = keep
        self._idle: list[Segment] = []

    def take(self) -> Segment:
        """An unused segment. Raises SharedMemoryFull."""
        return self._idle.pop() if self._idle else Segment(self._slots, self._slot_bytes)

    def put(self, segment: Segment) -> None:
        """Back from a connection that has ended."""
        if len(self._idle) < self._keep:
            self._idle.append(segment)
        else:
            segment.close()

    def close(self) -> None:
        """Closes the idle segments and keeps no more."""
        self._keep = 0
        while self._idle:
            self._idle.pop().close()


class SegmentView:
    """The reader's read-only side. Takes over `fd`. Raises ProtocolError if it does not fit."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self._slots = slots
        self._slot_bytes = slot_bytes
        size = slots * slot_bytes
        try:
            # Sealed against shrinking, or a reader of the mapping could be killed by SIGBUS.
            if os.fstat(fd).st_size < size or not (
                fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            ):
                raise ProtocolError(f"the segment is not sealed or smaller than {size} bytes")
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise ProtocolError(f"the segment cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def slot(self, index: int) -> memoryview:
        """The slot's bytes. Raises ProtocolError if there is no such slot."""
        if index >= self._slots:
            raise ProtocolError(f"slot {index} of a segment of {self._slots}")
        start = index * self._slot_bytes
        return memoryview(self._map)[start : start + self._slot_bytes]

    def close(self) -> None:
        """Unmaps, or, while a view is still held, leaves that to a later call or to its end."""
        with suppress(BufferError):
            self._map.close()
