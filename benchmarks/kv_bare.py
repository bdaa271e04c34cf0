"""Two bare processes that move KV through shared memory: the floor of the shm transport.

    python -m benchmarks.kv_bare FOLDER MIB

The sending one. It does what no such transport can leave out: each chunk is copied into shared
memory and its checksum taken, the reader is woken, takes the checksum once more, copies the
chunk out and gives its slot back. There is no protocol and no event loop: both ends block on a
socket, each on a core of its own, whatever the scheduler would make of two processes that wake
each other. Prints "serving" once it listens; ends with its reader.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.kv_peer import CHUNK_TOKENS, LAYOUT, SETTLE_S, chunks_of, kv_of, tokens_of
from kvtransfer.payload import array_headers, as_array, checksum, copy_into, places_of

_NAME = "bare.sock"
_SLOTS = 4
"""Measured: more of them are no longer in the caches, fewer make the ends wait for each other."""
_CHUNK = struct.Struct("<Qd")
"""A chunk's checksum, and when its transfer began."""
_PULL, _PUBLISH, _CREDIT = b"p", b"w", b"c"


def _slot(memory: mmap.mmap, number: int) -> memoryview:
    size = LAYOUT.slot_bytes(CHUNK_TOKENS)
    return memoryview(memory)[number % _SLOTS * size :][:size]


class BareReader:
    """The reading end, for tokens in a process's own arrays. Blocks. Close it."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(folder / _NAME))
        _, (fd,), _, _ = socket.recv_fds(self._socket, 1, 1)
        self._memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        os.close(fd)

    def take(self, kept: list[np.ndarray], *, published: bool) -> float:
        """Seconds until `kept` has all, from the pull on, or from when the KV was published to
        this end, which waited already. EOFError: the other end has gone."""
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        try:
            return self._take(kept, published)
        finally:
            os.sched_setaffinity(0, cores)

    def _take(self, kept: list[np.ndarray], published: bool) -> float:
        began = time.perf_counter()
        self._socket.send(_PUBLISH if published else _PULL)
        chunks = chunks_of(kept[0].shape[1])
        for number, (start, stop) in enumerate(chunks):
            data = self._socket.recv(_CHUNK.size, socket.MSG_WAITALL)
            if len(data) < _CHUNK.size:
                raise EOFError
            digest, published_at = _CHUNK.unpack(data)
            headers = array_headers(LAYOUT, stop - start)
            places = places_of(_slot(self._memory, number), headers)
            if checksum(places) != digest:
                raise RuntimeError(f"tokens [{start}, {stop}) are not what was sent")
            for target, place, header in zip(kept, places, headers, strict=True):
                np.copyto(target[:, start:stop], as_array(place, header))
            if number + _SLOTS < len(chunks):
                self._socket.send(_CREDIT)
        return time.perf_counter() - (published_at if published else began)

    def close(self) -> None:
        self._socket.close()


def _serve(reader: socket.socket, tokens: int) -> None:
    size = _SLOTS * LAYOUT.slot_bytes(CHUNK_TOKENS)
    fd = os.memfd_create("bare-kv")
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    socket.send_fds(reader, [b"m"], [fd])
    kv = kv_of(tokens)
    chunks = chunks_of(tokens)
    while order := reader.recv(1):
        if order == _PUBLISH:
            time.sleep(SETTLE_S)
        began, credit = time.perf_counter(), _SLOTS
        for number, (start, stop) in enumerate(chunks):
            if not credit:
                credit = len(reader.recv(_SLOTS))
            credit -= 1
            places = places_of(_slot(memory, number), array_headers(LAYOUT, stop - start))
            digest = copy_into(places, [array[:, start:stop] for array in kv])
            reader.send(_CHUNK.pack(digest, began))


def _main(folder: Path, mib: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / _NAME))
        listener.listen(1)
        print("serving", flush=True)
        reader, _ = listener.accept()
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        with reader:
            _serve(reader, tokens_of(mib))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
