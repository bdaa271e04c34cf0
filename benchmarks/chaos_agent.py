"""Faults that a worker process of the chaos run does to itself; see benchmarks.chaos_orders."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc

from benchmarks.chaos_orders import ANSWERS_AT, PROCESS, SESSION, Harm, Order
from engine.sequence import Sequence, SequenceState
from kvtransfer import grpc_transport, shm_transport
from kvtransfer.channel import ChannelClosed, Packed
from kvtransfer.frames import Frame, decode_header
from kvtransfer.messages import ChunkHeader
from protos import worker_pb2 as wire
from protos.outbox import Outbox
from protos.session_server import SessionServer

_GARBAGE = b"\xc1" * 16


def obey(folder: str) -> None:
    """Take orders in this process from now on."""
    orders = _Orders(folder)
    _watch_sequences(orders)
    _harm_transfers(orders)
    _harm_sessions(orders)
    threading.Thread(target=orders.listen, name="chaos", daemon=True).start()


class _Orders:
    """What is to be done next. Given by a thread; taken by the loop, or the engine's thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"{folder}/{os.getpid()}")
        self._order: Order | None = None
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Take what comes: an order, or nothing, which takes the last one back."""
        while True:
            data = self._socket.recv(4096)
            self.give(Order.decode(data) if data else None)

    def give(self, order: Order | None) -> None:
        with self._lock:
            self._order = order
        if order is not None and not order.at:
            self._at_once()

    def entered(self, state: SequenceState) -> None:
        """A sequence is in `state` now."""
        order = self._order  # often none, and then no lock is worth its price
        if order is None or order.at != state.value:
            return
        with self._lock:
            if self._order is not order:
                return
            self._order = replace(order, at="")
        self._at_once()

    def _at_once(self) -> None:
        """Do what waits for no message."""
        if order := self.take(PROCESS, Harm.KILL, Harm.STOP, Harm.END):
            os.kill(os.getpid(), signal.Signals[order.harm.value])
        elif self.take(SESSION, Harm.RESET):
            _cut_sessions()

    def take(self, what: str, *harms: Harm) -> Order | None:
        """The order for such a message, once, if it is one of `harms`."""
        with self._lock:
            order = self._order
            if order is None or order.at or order.what != what or order.harm not in harms:
                return None
            self._order = None
        self._socket.sendto(str(order.number).encode(), f"{self._folder}/{ANSWERS_AT}")
        return order


def _watch_sequences(orders: _Orders) -> None:
    slot = vars(Sequence)["state"]

    def enter(sequence: Sequence, state: SequenceState) -> None:
        slot.__set__(sequence, state)
        orders.entered(state)

    _patch(Sequence, "state", property(slot.__get__, enter))


def _patch(owner: type, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _cut_sessions() -> None:
    """Shut down, under gRPC's hands, what this process has accepted at its own address."""
    address = next(a for a in sys.argv if a.startswith("--address=unix:"))
    path = address.removeprefix("--address=unix:")
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue  # socket.socket() would refuse it, and not close its copy
            with socket.socket(fileno=os.dup(int(entry))) as one:
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if one.getsockname() == path and not listens:
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # no socket, or gone


# ---- transfers ----


def _harm_transfers(orders: _Orders) -> None:
    shm, stream = shm_transport, grpc_transport

    def cut_shm(channel: Any) -> None:
        channel._stream._socket.shutdown(socket.SHUT_RDWR)

    def cut_call(channel: Any) -> None:
        if isinstance(channel, stream._ReaderChannel):
            channel.cancel()
        raise ChannelClosed("cut by the chaos run")

    for ends in (shm._SourceChannel, shm._ReaderChannel):
        _patch(ends, "recv", _received(orders, ends.recv, cut_shm))
    _patch(stream._ByteChannel, "recv", _received(orders, stream._ByteChannel.recv, cut_call))
    _patch(shm._SourceChannel, "pack", _packed_in_place(orders, shm._SourceChannel.pack))
    _patch(stream._SourceChannel, "pack", _packed(orders, stream._SourceChannel.pack))


def _received(orders: _Orders, recv: Any, cut: Callable[[Any], None]) -> Any:
    async def harmed(channel: Any) -> Frame:
        frame: Frame = await recv(channel)
        what = type(frame.message).__name__
        harms = [Harm.RESET, Harm.DELAY]
        if not isinstance(frame.message, ChunkHeader):
            harms.append(Harm.CORRUPT)
        order = orders.take(what, *harms)
        if order is None:
            return frame
        match order.harm:
            case Harm.RESET:
                cut(channel)
            case Harm.DELAY:
                await asyncio.sleep(order.seconds)
            case Harm.CORRUPT:
                decode_header(_GARBAGE)
        return frame

    return harmed


def _packed_in_place(orders: _Orders, pack: Any) -> Any:
    def harmed(channel: Any, chunk: ChunkHeader, arrays: Any) -> Packed:
        packed: Packed = pack(channel, chunk, arrays)
        if orders.take(ChunkHeader.__name__, Harm.CORRUPT):
            channel._segment.slot(chunk.slot, 1)[0] ^= 1
        return packed

    return harmed


def _packed(orders: _Orders, pack: Any) -> Any:
    def harmed(channel: Any, chunk: ChunkHeader, arrays: Any) -> Packed:
        packed: Packed = pack(channel, chunk, arrays)
        if not orders.take(ChunkHeader.__name__, Harm.CORRUPT):
            return packed
        content = bytearray(packed.content)
        content[-1] ^= 1  # the payload comes last
        return Packed(packed.header, bytes(content))

    return harmed


# ---- sessions ----


def _harm_sessions(orders: _Orders) -> None:
    take, read, handler = Outbox.take, SessionServer._read, SessionServer.handler

    async def late_take(outbox: Outbox, wait_s: float) -> wire.Step:
        step = await take(outbox, wait_s)
        if order := orders.take(SESSION, Harm.DELAY):
            await asyncio.sleep(order.seconds)
        return step

    async def harmed(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for data in requests:
            order = orders.take(SESSION, Harm.DELAY, Harm.CORRUPT)
            if order is not None and order.harm is Harm.DELAY:
                await asyncio.sleep(order.seconds)
            yield data if order is None or order.harm is Harm.DELAY else _GARBAGE

    async def harmed_read(server: SessionServer, requests: Any, session: Any) -> None:
        await read(server, harmed(requests), session)

    def garbled(server: SessionServer) -> grpc.GenericRpcHandler:
        return _Garbled(handler(server), orders)

    _patch(Outbox, "take", late_take)
    _patch(SessionServer, "_read", harmed_read)
    _patch(SessionServer, "handler", garbled)


class _Garbled(grpc.GenericRpcHandler):
    """A service some of whose answers are garbage."""

    def __init__(self, inner: grpc.GenericRpcHandler, orders: _Orders) -> None:
        self._inner = inner
        self._orders = orders

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = self._inner.service(details)
        if method is None:
            return None
        serialize = method.response_serializer

        def sent(message: Any) -> bytes:
            garbage = self._orders.take(SESSION, Harm.CORRUPT)
            return _GARBAGE if garbage else serialize(message)

        return method._replace(response_serializer=sent)
