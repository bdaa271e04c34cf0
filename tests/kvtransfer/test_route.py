"""Which endpoint a fetch takes when the best one fails, and for how long it is remembered."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer import (
    Fetch,
    IntegrityError,
    KVSink,
    KVSource,
    KVTransferError,
    LayoutMismatch,
    SharedMemoryFull,
    SourceUnreachable,
    UnknownTransfer,
)
from kvtransfer.layout import ArraySpec, KVLayout
from tests.kvtransfer.harness import (
    CHUNK,
    LAYOUT,
    Link,
    Owner,
    decode_arrays,
    eventually,
    prefill_arrays,
    rest,
    serving,
    socket_folder,
)

A = b"transfer-a"
B = b"transfer-b"


@asynccontextmanager
async def linked_by(*transports: str, **options: Any) -> AsyncIterator[Link]:
    """One source that is served by several transports."""
    owner = Owner(LAYOUT)
    source = KVSource(LAYOUT, owner.read, owner.on_release, chunk_tokens=CHUNK, window=2)
    arrays = decode_arrays() if "jax" in transports else None
    sink = KVSink(options.pop("sink_layout", LAYOUT), arrays=arrays, **options)
    async with served_by(source, transports) as uris:
        yield Link(owner, source, sink, uris)
        await sink.close()
    await source.close()


@asynccontextmanager
async def served_by(source: KVSource, transports: tuple[str, ...]) -> AsyncIterator[list[str]]:
    if not transports:
        yield []
        return
    async with serving(source, transports[0]) as uri, served_by(source, transports[1:]) as more:
        yield [uri, *more]


async def lost(link: Link, fetch: Fetch) -> Exception:
    """How a fetch of A fails."""
    with pytest.raises(KVTransferError) as caught:
        await link.receive(fetch, A)
    await fetch.close(done=False)
    await eventually(lambda: not link.source._sessions)
    return caught.value


async def taken(link: Link, transfer_id: bytes) -> str:
    """The transport by which a transfer arrives whole."""
    link.publish(transfer_id, 20)
    fetch = link.fetch(transfer_id)
    await link.receive(fetch, transfer_id)
    return fetch.transport


@asynccontextmanager
async def breaking_socket() -> AsyncIterator[str]:
    """An shm endpoint that takes connections and breaks them at the first word."""

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        writer.close()

    async with socket_folder() as folder:
        path = f"{folder}/kv.sock"
        server = await asyncio.start_unix_server(break_off, path)
        yield f"shm://{path}"
        server.close()
        await server.wait_closed()
        with suppress(FileNotFoundError):
            os.unlink(path)


async def test_an_endpoint_that_breaks_before_the_admission_gives_way_to_the_next() -> None:
    async with linked_by("grpc") as link, breaking_socket() as bad:
        link.uris.insert(0, bad)
        assert await taken(link, A) == "grpc"
        assert link.sink.counts()["shm"].fallbacks == 1
        assert link.sink.counts()["grpc"].transfers == 1
        # The second one does not even try it.
        assert await taken(link, B) == "grpc"
        assert link.sink.counts()["shm"].fallbacks == 1


async def test_when_all_break_every_endpoint_is_named_and_none_avoided() -> None:
    async with linked_by() as link, breaking_socket() as first, breaking_socket() as second:
        link.uris[:] = [first, second, "grpc+unix:///nowhere/g.sock"]
        error = await lost(link, link.fetch(A))
        assert isinstance(error, SourceUnreachable)
        for uri in link.uris:
            assert uri in str(error)
        assert not link.sink._avoided._until
        assert all(end.fallbacks == 0 for end in link.sink.counts().values())


async def test_an_endpoint_that_is_not_there_is_tried_last_for_a_while() -> None:
    async with linked_by("grpc", avoid_s=0.2) as link, socket_folder() as folder:
        bad = f"shm://{folder}/kv.sock"
        link.uris.insert(0, bad)
        assert await taken(link, A) == "grpc"
        assert await taken(link, B) == "grpc"
        assert link.sink.counts()["shm"].fallbacks == 1
        avoided = link.sink._avoided._until
        assert [str(endpoint) for endpoint in avoided] == [bad]
        await eventually(lambda: max(avoided.values()) < asyncio.get_running_loop().time())
        assert await taken(link, b"c") == "grpc"
        assert link.sink.counts()["shm"].fallbacks == 2


async def test_arrays_that_cannot_be_pulled_cost_one_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control frames pass, so that the source has given the transfer to this reader."""

    park = prefill_arrays().park

    async with linked_by("jax", "grpc") as link:
        with monkeypatch.context() as patch:
            patch.setattr(
                prefill_arrays(), "park", lambda chunk: replace(park(chunk), address="127.0.0.1:1")
            )
            link.publish(A, 20)
            assert "no transfer server" in str(await lost(link, link.fetch(A)))
            assert await taken(link, B) == "grpc"
        # It is the only one now, and so it is taken, avoided or not.
        link.uris.pop()
        assert await taken(link, b"c") == "jax"


async def test_full_shared_memory_costs_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with linked_by("shm", "grpc") as link:
        monkeypatch.setattr(os, "posix_fallocate", full)
        link.publish(A, 20)
        assert isinstance(await lost(link, link.fetch(A)), SharedMemoryFull)
        assert await taken(link, B) == "grpc"


async def test_bytes_that_go_bad_on_the_way_cost_one_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked_by("shm", "grpc") as link:
        with monkeypatch.context() as patch:
            patch.setattr("kvtransfer.shm_transport.copy_into", lambda target, arrays: 7)
            link.publish(A, 20)
            assert isinstance(await lost(link, link.fetch(A)), IntegrityError)
        assert await taken(link, B) == "grpc"
    gc.collect()  # the error's traceback has held views of the segment


async def test_a_transport_that_has_moved_chunks_is_not_blamed_for_the_end() -> None:
    async with linked_by("shm", "grpc") as link:
        link.publish(A, 100)
        fetch = link.fetch(A)
        await fetch.admitted()
        chunks = fetch.chunks()
        (await anext(chunks)).release()
        (session,) = link.source._sessions
        session.hang_up()
        with pytest.raises(SourceUnreachable):
            await rest(chunks)
        await fetch.close(done=False)
        assert await taken(link, B) == "shm"


@pytest.mark.parametrize("fault", ["unknown", "mismatch"])
async def test_a_source_that_refuses_is_not_asked_by_another_way(fault: str) -> None:
    other = KVLayout("other", (ArraySpec("k", "bfloat16", 3, 2, 5),))
    layout = other if fault == "mismatch" else LAYOUT
    async with linked_by("shm", "grpc", sink_layout=layout) as link:
        link.source.claim_wait_s = 0.02
        error = await lost(link, link.fetch(A))
        assert isinstance(error, LayoutMismatch if fault == "mismatch" else UnknownTransfer)
        assert "grpc" not in link.sink.counts()
        assert not link.sink._avoided._until
