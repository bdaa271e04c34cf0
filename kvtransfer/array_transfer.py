"""This process's end of jax.experimental.transfer, which moves device arrays between processes.

The one module of this library that imports jax, for whoever serves or reads by the `jax`
transport; `kvtransfer.jax_transport` knows it by its methods alone.

What the transfer server does not do is done here. A pull never reshards: arrays travel as the
pieces that the source's devices hold, each to one device. A pull cannot be called off, and one
of arrays that are not there may never return: it runs in a daemon thread, under a deadline of
ours (a process with such a thread ends by os._exit). It asks for no authentication: arrays wait
under random numbers of 63 bits, and only for so long.
"""

from __future__ import annotations

import asyncio
import datetime
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from kvtransfer.errors import SourceUnreachable, TransferTimeout
from kvtransfer.messages import ArrayHeader, Parked

_T = TypeVar("_T")

PARKED_S = 120.0
"""Arrays that nobody has pulled for so long are dropped: their reader is gone."""
CONNECT_S = 1.0
"""How long a transfer server that was never pulled from may take to accept a connection."""
MOST_CONNECTIONS = 256
PULL_S = 30.0
"""How long the pull of one chunk may take."""

_HEADS = 2
"""The dimension of [layers, tokens, heads, width] that devices may divide."""


class ArrayTransfer:
    """Parks arrays for other processes and pulls theirs; starts a server for that.

    `host` is what other processes reach this machine by, `devices` where pulled arrays go.
    Raises OSError if `host` cannot be resolved.
    """

    def __init__(self, host: str, devices: Sequence[jax.Device]) -> None:
        self._devices = tuple(devices)
        self._connections: dict[str, transfer.TransferConnection] = {}
        address = f"{_number_of(host)}:0"
        client = self._devices[0].client
        self._server = transfer.start_transfer_server(client, address, [address])

    def park(self, arrays: Sequence[Any]) -> Parked:
        """Holds a chunk's arrays for one reader, each divided by heads or not at all."""
        held = [_pieces(array) for array in arrays]
        uuid = secrets.randbits(63)
        flat = [piece for pieces in held for piece in pieces]
        self._server.await_pull(uuid, flat, timeout=_in(PARKED_S))
        return Parked(uuid, self._server.address(), len(held[0]), arrays[0].shape[1])

    async def pull(self, parked: Parked, headers: Sequence[ArrayHeader]) -> list[Any]:
        """The arrays of a chunk: device arrays, or numpy ones where this end has fewer devices.

        Shapes are those of `headers` with `parked.tokens` tokens. Raises SourceUnreachable and
        TransferTimeout.
        """
        specs = [self._specs(parked, header) for header in headers]
        if parked.address not in self._connections:
            await _check_listens(parked.address)
        try:
            async with asyncio.timeout(PULL_S):
                pulled = await _in_daemon_thread(lambda: self._pull(parked, specs))
        except TimeoutError:
            self._connections.pop(parked.address, None)
            raise TransferTimeout(f"a chunk was not pulled within {PULL_S:g} s") from None
        except jax.errors.JaxRuntimeError as error:
            self._connections.pop(parked.address, None)
            raise SourceUnreachable(f"pulling a chunk failed: {str(error)[:200]}") from None
        return [self._joined(pieces) for pieces in pulled]

    def _specs(self, parked: Parked, header: ArrayHeader) -> list[jax.ShapeDtypeStruct]:
        """The pieces of one array, each for a device of its own while there are enough."""
        layers, _, heads, width = header.shape
        shape = (layers, parked.tokens, heads // parked.pieces, width)
        places = [self._devices[i % len(self._devices)] for i in range(parked.pieces)]
        return [
            jax.ShapeDtypeStruct(
                shape, np.dtype(header.dtype), sharding=SingleDeviceSharding(place)
            )
            for place in places
        ]

    def _pull(self, parked: Parked, specs: list[list[Any]]) -> list[list[jax.Array]]:
        connection = self._connections.get(parked.address)
        if connection is None:
            connection = self._server.connect(parked.address)
            self._connections[parked.address] = connection
            while len(self._connections) > MOST_CONNECTIONS:  # of sources that are no more
                del self._connections[next(iter(self._connections))]
        pulled: list[list[jax.Array]] = connection.pull(parked.uuid, specs, timeout=_in(PULL_S))
        return jax.block_until_ready(pulled)

    def _joined(self, pieces: list[jax.Array]) -> Any:
        """One array of all pieces, the heads in order."""
        if len(pieces) == 1:
            return pieces[0]
        if len(pieces) > len(self._devices):
            return np.concatenate([np.asarray(piece) for piece in pieces], axis=_HEADS)
        layers, tokens, heads, width = pieces[0].shape
        mesh = Mesh(np.array(self._devices[: len(pieces)]), ("heads",))
        return jax.make_array_from_single_device_arrays(
            (layers, tokens, heads * len(pieces), width),
            NamedSharding(mesh, PartitionSpec(None, None, "heads", None)),
            pieces,
        )


def _number_of(host: str) -> str:
    """The IP address of `host`: the transfer server resolves no names."""
    number = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0]
    return f"[{number}]" if ":" in str(number) else str(number)


async def _check_listens(address: str) -> None:
    """A pull from where no server listens waits for one until its deadline: ask before.

    Raises SourceUnreachable.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        reason = str(error) or type(error).__name__
        raise SourceUnreachable(f"no transfer server at {address[:80]!r}: {reason}") from None
    writer.close()


def _pieces(array: Any) -> list[jax.Array]:
    """What the devices hold of an array, in the order of the heads; a replicated one once."""
    if not isinstance(array, jax.Array):
        return [jax.device_put(array)]
    shards = array.addressable_shards
    if array.sharding.is_fully_replicated:
        return [shards[0].data]
    return [s.data for s in sorted(shards, key=lambda shard: shard.index[_HEADS].start or 0)]


def _in(seconds: float) -> datetime.datetime:
    return datetime.datetime.now() + datetime.timedelta(seconds=seconds)


async def _in_daemon_thread(function: Callable[[], _T]) -> _T:
    """What `function` returns or raises; neither the loop's nor the process's end waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="kv pull", daemon=True).start()
    return await future
