"""What only one transport has: addresses, flow control, arrays that stay where they are."""

from __future__ import annotations

import asyncio
import re

import grpc.aio
import pytest

from kvtransfer import (
    CHANNEL_OPTIONS,
    ArraySpec,
    KVLayout,
    KVSink,
    KVSource,
    ReleaseCause,
    SourceUnreachable,
    TransferAborted,
    device_uri,
    serve_device,
)
from kvtransfer.endpoints import parse_endpoint, ranked
from kvtransfer.frames import encode_header
from kvtransfer.grpc_transport import METHOD, SERVICE
from kvtransfer.messages import PROTOCOL_VERSION, Claim, Pull
from tests.kvtransfer.harness import (
    CHUNK,
    LAYOUT,
    Owner,
    decode_arrays,
    eventually,
    linked,
    new_source,
    serving,
)

A = b"transfer-a"


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
