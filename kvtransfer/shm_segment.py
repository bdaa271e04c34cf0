"""Shared memory of one connection: an anonymous file of slots, each one chunk long.

The file has no name, so nothing is left behind whoever dies, and a slot's memory is reserved
before its use, so that a full memory is an error here instead of a SIGBUS later.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

from kvtransfer.errors import ProtocolError, SharedMemoryFull


class Segment:
    """The source's writable side. Raises SharedMemoryFull if there is no room to map it."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._reserved = [0] * slots
        size = slots * slot_bytes
        self.fd = os.memfd_create("hexserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            os.close(self.fd)
            raise SharedMemoryFull(
                f"no room for {slots} chunks of {slot_bytes} bytes: {error.strerror}"
            ) from error

    def slot(self, index: int, size: int) -> memoryview:
        """The first `size` bytes of a slot. To be dropped before `close`.

        Raises SharedMemoryFull if memory for them cannot be reserved.
        """
        start, reserved = index * self.slot_bytes, self._reserved[index]
        if reserved < size:
            try:
                os.posix_fallocate(self.fd, start + reserved, size - reserved)
            except OSError as error:
                raise SharedMemoryFull(
                    f"no shared memory for a chunk of {size} bytes: {error.strerror}"
                ) from error
            self._reserved[index] = size
        return memoryview(self._map)[start : start + size]

    def close(self) -> None:
        """Gives the memory back, once the reader has unmapped it as well."""
        os.close(self.fd)
        # A view still held (by a traceback, say) keeps the mapping until it goes.
        with suppress(BufferError):
            self._map.close()


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
