"""Bytes that are no frames, and another version's, to either end of each transport."""

from __future__ import annotations

import asyncio
import os

import grpc
import grpc.aio
import pytest

from kvtransfer import KVSink, SourceUnreachable
from kvtransfer.errors import ProtocolError
from kvtransfer.frames import MAX_HEADER_BYTES, PREFIX, decode_frame
from kvtransfer.grpc_transport import METHOD, SERVICE
from kvtransfer.jax_transport import METHOD as ARRAYS_METHOD
from kvtransfer.messages import PROTOCOL_VERSION, Failed
from tests.kvtransfer.harness import LAYOUT, decode_arrays, linked, socket_folder

A = b"transfer-a"
GARBAGE = [
    b"\x00",
    b"\xff" * 64,
    PREFIX.pack(MAX_HEADER_BYTES + 1),
    PREFIX.pack(3) + b"\xc1\xc1\xc1",
    PREFIX.pack(1) + b"\x90",
    b"GET / HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_shm_socket_survives_garbage(garbage):
    async with linked("shm") as link:
        path = link.uris[0].removeprefix("shm://")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(garbage)
        writer.write_eof()
        await reader.read()  # until the source hangs up
        writer.close()
        await writer.wait_closed()
        link.publish(A, 10)
        await link.receive(link.fetch(A), A)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(("transport", "method"), [("grpc", METHOD), ("jax", ARRAYS_METHOD)])
async def test_grpc_survives_garbage(garbage, transport, method):
    async with linked(transport) as link:
        target = link.uris[0].removeprefix(f"{transport}://")
        async with grpc.aio.insecure_channel(target) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{method}")()
            await call.write(garbage)
            failed = decode_frame(await call.read()).message
            assert isinstance(failed, Failed)
            assert failed.code == "protocol"
        link.publish(A, 10)
        await link.receive(link.fetch(A), A)


@pytest.mark.parametrize("garbage", [*GARBAGE, b""])
async def test_a_reader_of_garbage_by_shm_is_told_at_once(garbage):
    async with socket_folder() as folder:
        path = f"{folder}/kv.sock"

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(4)
            writer.write(garbage)
            writer.close()

        server = await asyncio.start_unix_server(answer, path)
        await told_of_garbage([f"shm://{path}"])
        server.close()
        await server.wait_closed()
        os.unlink(path)


@pytest.mark.parametrize("garbage", [*GARBAGE, b""])
@pytest.mark.parametrize(("transport", "method"), [("grpc", METHOD), ("jax", ARRAYS_METHOD)])
async def test_a_reader_of_garbage_by_grpc_is_told_at_once(garbage, transport, method):
    async def answer(_, context) -> None:
        await context.send_initial_metadata(())
        await context.read()
        await context.write(garbage)

    handler = grpc.method_handlers_generic_handler(
        SERVICE, {method: grpc.stream_stream_rpc_method_handler(answer)}
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await told_of_garbage([f"{transport}://127.0.0.1:{port}"])
    await server.stop(None)


async def told_of_garbage(uris: list[str]) -> None:
    sink = KVSink(LAYOUT, arrays=decode_arrays())
    fetch = sink.fetch(uris, A)
    async with asyncio.timeout(2):
        with pytest.raises((ProtocolError, SourceUnreachable)):
            await fetch.admitted()
    await fetch.close(done=False)
    await sink.close()


@pytest.mark.parametrize("transport", ["shm", "jax", "grpc"])
async def test_a_reader_of_another_version_is_told_both(transport, monkeypatch):
    async with linked(transport) as link:
        link.publish(A, 10)
        with monkeypatch.context() as patch:
            patch.setattr("kvtransfer.fetch.PROTOCOL_VERSION", 99)
            fetch = link.fetch(A)
            told = f"version 99, the source version {PROTOCOL_VERSION}"
            with pytest.raises(ProtocolError, match=told):
                await fetch.admitted()
        await fetch.close(done=False)
        await link.receive(link.fetch(A), A)
