"""A Unix socket written at once where it can be, and later where it must."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest

from kvtransfer.channel import ChannelClosed
from kvtransfer.unix_stream import UnixStream
from tests.kvtransfer.harness import eventually

MUCH = os.urandom(4 << 20)
"""More than a socket holds."""


@pytest.fixture
async def streams() -> AsyncIterator[tuple[UnixStream, UnixStream]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pair = UnixStream(ours, accept_fd=False), UnixStream(theirs, accept_fd=True)
    yield pair
    for stream in pair:
        stream.close()
        stream.close()


async def test_what_the_socket_takes_is_out_at_once(streams):
    ours, theirs = streams
    assert ours.post(b"one")
    assert ours.post(b"two")
    assert await theirs.read_exactly(6) == b"onetwo"
    await ours.flush()


async def test_the_rest_waits_for_its_flush_and_keeps_its_order(streams):
    ours, theirs = streams
    passed = os.memfd_create("passed")
    assert not ours.post(MUCH)
    assert not ours.post(b"fd", passed)
    assert not ours.post(b"last")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):  # a flush that is given up loses nothing
            await ours.flush()
    flushing = asyncio.create_task(ours.flush())
    assert await theirs.read_exactly(len(MUCH)) == MUCH
    assert await theirs.read_exactly(6) == b"fdlast"
    await flushing
    received = theirs.take_fd()
    assert received is not None
    assert os.fstat(received).st_ino == os.fstat(passed).st_ino
    assert theirs.take_fd() is None
    os.close(received)
    os.close(passed)


async def test_a_read_given_up_loses_nothing_and_none_is_watched_for_in_vain(streams):
    ours, theirs = streams
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await theirs.read_exactly(4)
    assert theirs._watched
    ours.post(b"ab")
    await eventually(lambda: not theirs._watched)  # else the loop would spin
    ours.post(b"cd")
    assert await theirs.read_exactly(4) == b"abcd"


async def test_a_peer_that_has_gone(streams):
    ours, theirs = streams
    assert not ours.post(MUCH)
    flushing = asyncio.create_task(ours.flush())
    await theirs.read_exactly(1)
    theirs.close()
    with pytest.raises(ChannelClosed):
        await flushing
    with pytest.raises(ChannelClosed):
        ours.post(b"more")
    with pytest.raises(ChannelClosed):
        await ours.read_exactly(1)
    with pytest.raises(ChannelClosed, match="closed"):
        await theirs.read_exactly(len(MUCH))
