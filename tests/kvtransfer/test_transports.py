"""What only one transport has: sockets and their files, shared memory, raw bytes, flow control."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import re
import socket
import time
from contextlib import suppress

import grpc.aio
import pytest

from kvtransfer import (
    CHANNEL_OPTIONS,
    ArraySpec,
    KVLayout,
    KVSink,
    KVSource,
    ReleaseCause,
    SharedMemoryFull,
    SourceUnreachable,
    TransferAborted,
    device_uri,
    serve_device,
    serve_shm,
)
from kvtransfer.endpoints import parse_endpoint, ranked
from kvtransfer.errors import ProtocolError
from kvtransfer.frames import encode_header
from kvtransfer.grpc_transport import METHOD, SERVICE
from kvtransfer.messages import PROTOCOL_VERSION, Claim, Pull, SegmentOpened
from kvtransfer.shm_segment import Segment, SegmentView
from kvtransfer.shm_transport import IDLE_CONNECTIONS, ShmConnector
from tests.kvtransfer.harness import (
    CHUNK,
    LAYOUT,
    MIXED,
    Link,
    Owner,
    decode_arrays,
    eventually,
    linked,
    serving,
    socket_folder,
)

A = b"transfer-a"
B = b"transfer-b"


def new_source(**options) -> KVSource:
    owner = Owner(LAYOUT)
    return KVSource(LAYOUT, owner.read, owner.on_release, chunk_tokens=CHUNK, **options)


@pytest.mark.parametrize(
    "uri",
    [
        "shm:///nowhere/kv.sock", "grpc+unix:///nowhere/kv.sock", "grpc://127.0.0.1:1",
        "jax+unix:///nowhere/kv.sock", "jax://127.0.0.1:1",
        "device://another-process/prefill-0", device_uri("nobody"),
    ],
)  # fmt: skip
async def test_unreachable(uri):
    sink = KVSink(LAYOUT, arrays=decode_arrays())
    fetch = sink.fetch([uri], A)
    async with asyncio.timeout(2):
        with pytest.raises(SourceUnreachable, match=re.escape(uri)):
            await fetch.admitted()
    await fetch.close(done=False)
    await sink.close()


async def transport_used(source: KVSource, sink: KVSink, uris: list[str]) -> str:
    """The module of the channel by which `sink` reaches `source`."""
    source.offer(A)
    source.admit(A, 4)
    fetch = sink.fetch(uris, A)
    await fetch.admitted()
    used = type(fetch._channel).__module__.rpartition(".")[2]
    await fetch.close(done=False)
    await eventually(lambda: source.active() == 0)
    return used


async def test_best_endpoint_first_and_the_next_if_it_does_not_answer():
    owner = Owner(LAYOUT)
    source = KVSource(LAYOUT, owner.read, owner.on_release, chunk_tokens=CHUNK)
    sink = KVSink(LAYOUT)
    async with serving(source, "grpc") as tcp:
        async with serving(source, "shm") as shm, serving(source, "device") as device:
            cases = {
                "device_transport": [tcp, shm, device],
                "shm_transport": [tcp, "device://another-process/prefill-0", shm],
                "grpc_transport": ["ici://3", "shm:///nowhere/kv.sock", tcp],
            }
            for transport, uris in cases.items():
                assert await transport_used(source, sink, uris) == transport
            choosy = KVSink(LAYOUT, transports=("grpc", "device"))
            assert await transport_used(source, choosy, [shm, device, tcp]) == "grpc_transport"
            assert await transport_used(source, choosy, [shm, device]) == "device_transport"
            await choosy.close()
        await sink.close()
    fetch = sink.fetch(["ici://3"], A)
    with pytest.raises(SourceUnreachable, match="none is of device, shm, grpc"):
        await fetch.admitted()
    await fetch.close(done=False)
    await source.close()


def test_endpoints():
    uris = ["grpc://[::1]:80", "new://x", "shm:///a/b", "grpc+unix:///c", "device://p/n"]
    best_first = ["device://p/n", "shm:///a/b", "grpc+unix:///c", "grpc://[::1]:80"]
    assert [str(e) for e in ranked(uris)] == best_first
    assert [str(e) for e in ranked(uris, ("grpc", "shm"))] == [*best_first[2:], "shm:///a/b"]
    bad_ones = (
        "grpc://host", "grpc://host:0", "grpc://:80", "shm://a/b", "http://x", "x", "device://p",
        "device:///n",
    )  # fmt: skip
    for bad in bad_ones:
        with pytest.raises(ValueError, match=bad):
            parse_endpoint(bad)


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


async def test_grpc_reader_that_does_not_read_loses_its_lease():
    layout = KVLayout("big", (ArraySpec("k", "float32", 8, 32, 128),))
    options = {"chunk_tokens": 64, "window": 8, "lease_s": 0.2}
    async with linked("grpc", layout, **options) as link:
        target = link.uris[0].removeprefix("grpc://")
        link.publish(A, 250)
        async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            await call.write(encode_header(Claim(PROTOCOL_VERSION, A, 0, layout)))
            await call.read()
            await call.write(encode_header(Pull(0)))
            await link.owner.until(lambda: link.owner.released)
            assert link.owner.released == [(A, ReleaseCause.LEASE_EXPIRED)]
            await eventually(lambda: not link.source._sessions)
            call.cancel()


async def test_closing_the_server_ends_its_transfers():
    owner = Owner(LAYOUT)
    source = KVSource(LAYOUT, owner.read, owner.on_release, chunk_tokens=CHUNK)
    sink = KVSink(LAYOUT)
    async with serving(source, "shm") as uri:
        source.offer(A)
        source.admit(A, 20)
        fetch = sink.fetch([uri], A)
        await fetch.admitted()
    assert owner.released == [(A, ReleaseCause.READER_LOST)]
    with pytest.raises((SourceUnreachable, TransferAborted)):
        await anext(fetch.chunks())
    await fetch.close(done=False)
    await sink.close()


async def test_device_arrays_are_handed_over_and_not_copied():
    async with linked("device") as link:
        made = []

        async def read(*asked: object) -> list[object]:
            made.append(await link.owner.read(*asked))
            return made[-1]

        link.source.read = read
        link.publish(A, 10)
        fetch = link.fetch(A)
        await fetch.admitted()
        chunks = [chunk async for chunk in fetch.chunks()]
        for chunk, arrays in zip(chunks, made, strict=True):
            assert all(got is given for got, given in zip(chunk.arrays, arrays, strict=True))
            chunk.release()
        await fetch.close(done=True)


async def test_a_device_name_is_taken_once_and_served_on_its_own_loop_only():
    source = new_source()
    server = serve_device(source, "prefill-0")
    assert server.uri == device_uri("prefill-0")
    with pytest.raises(ValueError, match="'prefill-0' is served in this process already"):
        serve_device(source, "prefill-0")

    async def elsewhere() -> None:
        fetch = KVSink(LAYOUT).fetch([server.uri], A)
        with pytest.raises(SourceUnreachable, match="on this event loop"):
            await fetch.admitted()
        await fetch.close(done=False)

    await asyncio.to_thread(asyncio.run, elsewhere())
    await server.close()
    await server.close()
    await serve_device(source, "prefill-0").close()
