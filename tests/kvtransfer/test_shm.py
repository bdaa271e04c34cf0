"""What only shm has: sockets and their files, shared memory, connections kept for more."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import time
from contextlib import suppress

import pytest

from kvtransfer import KVSink, KVSource, ReleaseCause, SharedMemoryFull, serve_shm
from kvtransfer.errors import ProtocolError
from kvtransfer.frames import encode_header
from kvtransfer.messages import SegmentOpened
from kvtransfer.shm_segment import Segment, SegmentView
from kvtransfer.shm_transport import IDLE_CONNECTIONS, ShmConnector
from tests.kvtransfer.harness import (
    CHUNK,
    LAYOUT,
    MIXED,
    Link,
    Owner,
    eventually,
    linked,
    new_source,
    socket_folder,
)

A = b"transfer-a"
B = b"transfer-b"


async def test_shm_socket_file_and_folder():
    async with socket_folder() as folder:
        path = f"{folder}/kv.sock"
        server = await serve_shm(new_source(), path)
        with pytest.raises(OSError, match="in use"):
            await serve_shm(new_source(), path)
        await server.close()
        await server.close()
        # One that a killed worker left behind is replaced.
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(path)
        await (await serve_shm(new_source(), path)).close()
        with pytest.raises(ValueError, match="107"):
            await serve_shm(new_source(), f"{folder}/{'x' * 100}")
        os.chmod(folder, 0o755)
        with pytest.raises(ValueError, match="0700"):
            await serve_shm(new_source(), path)


def segment_descriptors() -> set[str]:
    """The open descriptors of shared segments; others come and go with gRPC's threads."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            if "memfd:hexserve-kv" in os.readlink(f"/proc/self/fd/{descriptor}"):
                found.add(descriptor)
    return found


async def test_shm_memory_full(monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with linked("shm") as link:
        descriptors = segment_descriptors()
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            link.publish(A, 10)
            fetch = link.fetch(A)
            await fetch.admitted()
            with pytest.raises(SharedMemoryFull, match="No space left"):
                await anext(fetch.chunks())
            await fetch.close(done=False)
        assert link.owner.released == [(A, ReleaseCause.FAILED)]
        await eventually(lambda: not link.source._sessions)
        assert segment_descriptors() <= descriptors
        link.publish(B, 10)
        await link.receive(link.fetch(B), B)


async def test_shm_arrays_are_aligned_views_and_read_only():
    async with linked("shm", MIXED) as link:
        link.publish(A, 30)
        fetch = link.fetch(A)
        await fetch.admitted()
        async for chunk in fetch.chunks():
            for array in chunk.arrays:
                assert array.ctypes.data % 64 == 0
                assert array.flags.c_contiguous
                assert not array.flags.writeable
                with pytest.raises(ValueError, match="WRITEABLE"):
                    array.flags.writeable = True
            chunk.release()
            assert chunk.arrays == []
        await fetch.close(done=True)


def segments() -> set[str]:
    """The shared segments that this process has open or mapped, by inode."""
    with open("/proc/self/maps") as maps:
        return {line.split()[4] for line in maps if "memfd:hexserve-kv" in line}


async def test_shm_segment_is_reused_only_when_nobody_reads_it():
    async with linked("shm") as link:
        link.publish(A, 30)
        await link.receive(link.fetch(A), A)
        pooled = segments()
        assert len(pooled) == 1
        link.publish(B, 30)
        fetch = link.fetch(B)
        await fetch.admitted()
        held = await anext(fetch.chunks())
        assert segments() == pooled
        # The lease ends under a reader that still looks: what it sees must stay.
        (session,) = link.source._sessions
        session.lease_expired(0)
        await session.task
        link.publish(b"c", 30)
        await link.receive(link.fetch(b"c"), b"c")
        link.check(B, held.start, held.stop, held.arrays)
        assert len(segments()) == 2
        await fetch.close(done=False)
        assert not segments() & pooled
    assert segments() == set()


async def test_shm_keeps_a_few_connections_while_their_source_lives():
    descriptors = len(os.listdir("/proc/self/fd"))
    async with socket_folder() as folder:
        owner = Owner(LAYOUT)
        source = KVSource(LAYOUT, owner.read, owner.on_release, chunk_tokens=CHUNK)
        server = await serve_shm(source, f"{folder}/kv.sock")
        sink = KVSink(LAYOUT)
        link = Link(owner, source, sink, [server.uri])
        ids = [bytes([number]) for number in range(IDLE_CONNECTIONS + 3)]
        for transfer_id in ids:
            link.publish(transfer_id, 10)
        await asyncio.gather(*(link.receive(link.fetch(each), each) for each in ids))
        await eventually(lambda: len(source._sessions) == IDLE_CONNECTIONS)
        assert len(segments()) == IDLE_CONNECTIONS
        await server.close()
        await eventually(lambda: not sink._shm._idle)
        await source.close()

        # The next one at that address is another source, reached by a connection of its own.
        source = KVSource(LAYOUT, owner.read, owner.on_release, chunk_tokens=CHUNK)
        async with asyncio.timeout(5):
            server = await serve_shm(source, f"{folder}/kv.sock")
            link = Link(owner, source, sink, [server.uri])
            link.publish(b"next", 10)
            await link.receive(link.fetch(b"next"), b"next")
        await sink.close()
        await server.close()
        await source.close()
    assert segments() == set()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) == descriptors)


async def test_shm_claim_by_a_kept_connection_in_the_moment_of_its_end():
    async with linked("shm", claim_wait_s=0.05) as link:
        link.publish(A, 10)
        await link.receive(link.fetch(A), A)
        link.publish(B, 10)
        fetch = link.fetch(B)
        await eventually(lambda: not link.sink._shm._idle)  # taken
        await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251  (the source's loop is held up beyond its patience)
        await link.receive(fetch, B)


async def test_shm_reader_ends_a_kept_connection_before_its_source_does(monkeypatch):
    monkeypatch.setattr("kvtransfer.shm_transport.IDLE_S", 0.01)
    async with linked("shm", claim_wait_s=60.0) as link:
        link.publish(A, 10)
        await link.receive(link.fetch(A), A)
        await eventually(lambda: not link.source._sessions)
        assert not link.sink._shm._idle
        assert not link.source.counts()["shm"].failures


async def test_shm_idle_connection_ends_when_nothing_is_claimed():
    async with linked("shm", claim_wait_s=0.05) as link:
        link.publish(A, 10)
        await link.receive(link.fetch(A), A)
        assert len(link.source._sessions) == 1
        async with asyncio.timeout(5):
            while link.source._sessions:
                await asyncio.gather(*(session.task for session in link.source._sessions))
        assert not link.sink._shm._idle
        link.publish(B, 10)
        await link.receive(link.fetch(B), B)


async def test_shm_view_kept_too_long_is_memory_not_a_crash():
    async with linked("shm") as link:
        link.publish(A, 10)
        fetch = link.fetch(A)
        await fetch.admitted()
        kept = (await anext(fetch.chunks())).arrays[0]
        await fetch.close(done=False)
        assert kept.tobytes() == link.owner.kv(A, 0, CHUNK)[0].tobytes()
    del kept, fetch
    gc.collect()
    assert segments() == set()


def test_segment_is_checked_by_its_reader():
    segment = Segment(2, 4096)
    with pytest.raises(ProtocolError, match="smaller"):
        SegmentView(os.dup(segment.fd), 3, 4096)
    view = SegmentView(os.dup(segment.fd), 2, 4096)
    with pytest.raises(ProtocolError, match="slot 2"):
        view.slot(2)
    view.close()
    segment.close()
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 8192)
    with pytest.raises(ProtocolError, match="sealed"):
        SegmentView(unsealed, 2, 4096)


async def test_shm_segment_without_descriptor():
    async with socket_folder() as folder:
        path = f"{folder}/kv.sock"
        accepted: asyncio.Queue = asyncio.Queue()
        server = await asyncio.start_unix_server(lambda r, w: accepted.put_nowait(w), path)
        channel = await ShmConnector().connect(path)
        writer = await accepted.get()
        writer.write(encode_header(SegmentOpened(2, 64)))
        with pytest.raises(ProtocolError, match="no file descriptor"):
            await channel.recv()
        await channel.close()
        writer.close()
        server.close()
        await server.wait_closed()
        os.unlink(path)
