"""The decode worker's end: fetches a transfer's KV, chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvtransfer.books import TransferBooks, TransferCounts
from kvtransfer.channel import Channel
from kvtransfer.device_transport import connect_device
from kvtransfer.endpoints import TRANSPORTS, Endpoint, ranked
from kvtransfer.fetch import Fetch
from kvtransfer.grpc_transport import GrpcConnector
from kvtransfer.jax_transport import Arrays, connect_arrays
from kvtransfer.layout import KVLayout
from kvtransfer.protocol import State
from kvtransfer.route import AvoidedEndpoints, Route
from kvtransfer.shm_transport import ShmConnector


class KVSink:
    """Fetches KV from sources. Lives on one asyncio loop; close it when no fetch is open.

    `transports` are the names of those it uses, best first; jax is not used without `arrays`.
    `connect_timeout_s` bounds the opening of one endpoint; `admit_timeout_s` the wait for the
    source's admission (None: as long as the connection holds); `stall_timeout_s` the wait for
    the next chunk once pulled. An endpoint that failed is tried last for `avoid_s`.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        transports: Sequence[str] = TRANSPORTS,
        arrays: Arrays | None = None,
        connect_timeout_s: float = 2.0,
        admit_timeout_s: float | None = None,
        stall_timeout_s: float = 60.0,
        avoid_s: float = 30.0,
    ) -> None:
        self.layout = layout
        self._transports = tuple(t for t in transports if t != "jax" or arrays is not None)
        self._arrays = arrays
        self._admit_timeout_s = admit_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._shm = ShmConnector()
        self._grpc = GrpcConnector()
        self._avoided = AvoidedEndpoints(avoid_s)
        self._books = TransferBooks()
        self._fetches: set[Fetch] = set()

    def fetch(self, sources: Sequence[str], transfer_id: bytes, from_token: int = 0) -> Fetch:
        """Begins to fetch; connects and claims in the background. Close what it returns.

        `sources` are one source's endpoints; the best that can be reached is used, in the
        order of `transports`, and the next one if it breaks before the source has admitted.
        Raises ValueError for a malformed URI; all else comes from the Fetch's methods.
        """
        endpoints = ranked(sources, self._transports)
        refusal = f"no endpoint of {list(sources)} can be reached"
        if not endpoints:
            refusal += f": none is of {', '.join(self._transports)}"
        fetch = Fetch(
            Route(endpoints, refusal, self._open, self._avoided, self._books),
            self.layout,
            transfer_id,
            from_token,
            admit_timeout_s=self._admit_timeout_s,
            stall_timeout_s=self._stall_timeout_s,
            on_closed=self._fetches.discard,
        )
        self._fetches.add(fetch)
        return fetch

    def counts(self) -> dict[str, TransferCounts]:
        """What has been fetched so far and what is under way, by transport."""
        counts = self._books.snapshot()
        for fetch in self._fetches:
            if fetch.state is State.ADMITTED:
                counts.setdefault(fetch.transport, TransferCounts()).waiting += 1
        return counts

    async def _open(self, endpoint: Endpoint) -> Channel:
        async with asyncio.timeout(self._connect_timeout_s):
            return await self._connect(endpoint)

    async def _connect(self, endpoint: Endpoint) -> Channel:
        if endpoint.scheme == "device":
            return await connect_device(endpoint.target)
        if endpoint.scheme == "shm":
            return await self._shm.connect(endpoint.target)
        if endpoint.scheme.startswith("jax"):
            assert self._arrays is not None
            return await connect_arrays(self._grpc, endpoint, self._arrays, self.layout)
        return await self._grpc.connect(endpoint)

    async def close(self) -> None:
        """Closes the connections that fetches shared. Idempotent."""
        self._shm.close()
        await self._grpc.close()
