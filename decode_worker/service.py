"""The decode role: fetches KV from a prefill worker and continues from its first token.

Nothing is reserved before the prefill worker has admitted its side, so no worker ever holds
blocks for a transfer whose other side may never start.

    fetch                        engine
    claim, admitted          →   Add … Admitted (slot and blocks reserved, some with KV)
    pull the rest, chunks            →   WriteKV … KVWritten (chunk's memory released)
    end, with first token    →   BeginDecode
    done
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from engine.events import Abort, Add, Admitted, BeginDecode, Command, KVWritten, WriteKV
from engine.types import AttemptId, Failure, FailureCode, SequenceId, SequenceRequest
from kvtransfer import (
    TRANSPORTS,
    Arrays,
    Chunk,
    Fetch,
    KVLayout,
    KVSink,
    KVTransferError,
    TransferCounts,
)
from protos import worker_pb2 as wire
from protos.codec import StartOrder, WireError, decode_delta
from protos.session_server import SessionServer

log = logging.getLogger("hexserve.decode")

RENEW_INTERVAL_S = 5.0
"""How often a prefill worker's lease is renewed while there is no room here."""
STALL_LIMIT_S = 300.0
"""How long a pulled chunk may take: a whole prompt is computed in one step. Routers give a
worker up whose step takes longer."""


class SequenceGone(Exception):
    """The engine does not import this sequence (any more)."""


class DecodeService:
    """Lives on the worker's asyncio loop."""

    def __init__(
        self,
        submit: Callable[[Command], None],
        layout: KVLayout,
        chunk_tokens: int,
        transports: Sequence[str] = TRANSPORTS,
        arrays: Arrays | None = None,
    ) -> None:
        """`chunk_tokens`: the most tokens of one WriteKV; `transports`, `arrays`: see KVSink."""
        self._submit = submit
        self._chunk_tokens = chunk_tokens
        self._sessions: SessionServer | None = None
        self._sink = KVSink(
            layout, transports=transports, arrays=arrays, stall_timeout_s=STALL_LIMIT_S
        )
        self._fetches: dict[AttemptId, asyncio.Task[None]] = {}
        self._admissions: dict[SequenceId, asyncio.Future[int]] = {}
        self._write_ids = itertools.count()
        self._writes: dict[int, asyncio.Future[bool]] = {}
        self._engine_gone = False

    def attach(self, sessions: SessionServer) -> None:
        """Say whom to tell of failures; once, before the first order."""
        self._sessions = sessions

    def counts(self) -> dict[str, TransferCounts]:
        """What has been fetched so far, by transport."""
        return self._sink.counts()

    # ---- orders ----

    def start(self, order: StartOrder) -> None:
        """Begin to fetch an attempt's KV."""
        if order.attempt not in self._fetches:
            task = asyncio.create_task(self._serve(order))
            self._fetches[order.attempt] = task
            task.add_done_callback(lambda _: self._fetches.pop(order.attempt, None))

    def abort(self, attempt: AttemptId) -> None:
        """Forget an attempt in whatever state; idempotent."""
        task = self._fetches.get(attempt)
        if task is not None:
            task.cancel()
        self._submit(Abort(attempt))

    # ---- events ----

    def handle(self, event: object) -> None:
        """Take in an engine event; those of other roles are ignored."""
        match event:
            case Admitted(sequence, _, _, reused):
                admission = self._admissions.pop(sequence, None)
                if admission is not None and not admission.done():
                    admission.set_result(reused)
            case KVWritten(import_id, ok):
                written = self._writes.pop(import_id, None)
                if written is not None and not written.done():
                    written.set_result(ok)

    def failed(self, attempt: AttemptId, message: str) -> None:
        """The engine does not take this attempt."""
        for sequence, admission in list(self._admissions.items()):
            if sequence.attempt == attempt and not admission.done():
                admission.set_exception(SequenceGone(message))

    def engine_died(self) -> None:
        """No write will be answered any more."""
        self._engine_gone = True
        for write_id in list(self._writes):
            self.handle(KVWritten(write_id, ok=False))

    # ---- one attempt ----

    async def _serve(self, order: StartOrder) -> None:
        (request,) = order.sequences
        try:
            await self._import(order, request)
        except SequenceGone:
            pass  # the engine has told the router why, or was told to abort
        except (KVTransferError, WireError, DecodeError, ValueError) as error:
            log.info("transfer for %s failed: %s", order.attempt.request_id, error)
            self._fail(order.attempt, FailureCode.TRANSFER, str(error))
        except Exception as error:  # a fault here must not cost more than this attempt
            log.exception("import of %s failed", order.attempt.request_id)
            self._fail(order.attempt, FailureCode.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            self._admissions.pop(request.id, None)

    def _fail(self, attempt: AttemptId, code: FailureCode, message: str) -> None:
        if self._sessions is not None:
            self._sessions.failed(Failure(attempt, code, message))

    async def _import(self, order: StartOrder, request: SequenceRequest) -> None:
        fetch = self._sink.fetch(order.sources, order.transfer_id)
        writes: list[asyncio.Future[bool]] = []
        done = False
        try:
            tokens = await fetch.admitted()
            if tokens != len(request.known_tokens):
                raise WireError(
                    f"the prefill worker has {tokens} tokens, {len(request.known_tokens)} are due"
                )
            reused = await self._reserve(request, fetch)
            async for chunk in fetch.chunks(from_token=reused):
                held = max(array.shape[1] for array in chunk.arrays)  # padding included
                if held > self._chunk_tokens:
                    raise WireError(f"a chunk of {held} tokens, {self._chunk_tokens} are the most")
                writes.append(self._write(request.id, chunk))
            await _settled(writes)
            if not all(write.result() for write in writes):
                raise SequenceGone("aborted while its KV arrived")
            first = decode_delta(wire.Tokens.FromString(fetch.trailer))
            if first.id != request.id or len(first.tokens) != 1:
                raise WireError(f"a first token of {first.id} for {request.id}")
            self._submit(BeginDecode(request.id, first.tokens[0]))
            done = True
        finally:
            if not done:
                self._submit(Abort(order.attempt))
            try:
                # The chunks' memory is the engine's until it has answered every write.
                await _settled(writes)
            finally:  # an abort may cut that wait short
                await fetch.close(done=done)

    async def _reserve(self, request: SequenceRequest, fetch: Fetch) -> int:
        """Wait for slot and blocks; the other side's lease is kept alive meanwhile.

        Returns how many tokens' KV is in the blocks already.
        """
        admission = asyncio.get_running_loop().create_future()
        self._admissions[request.id] = admission
        self._submit(Add(request))
        while True:
            done, _ = await asyncio.wait((admission,), timeout=RENEW_INTERVAL_S)
            if done:
                return admission.result()
            fetch.renew()

    def _write(self, sequence: SequenceId, chunk: Chunk) -> asyncio.Future[bool]:
        write_id = next(self._write_ids)
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        written.add_done_callback(lambda _: chunk.release())
        if self._engine_gone:
            written.set_result(False)
            return written
        self._writes[write_id] = written
        arrays = tuple(chunk.arrays)
        self._submit(WriteKV(write_id, sequence, chunk.start, chunk.stop, arrays, chunk.windowed))
        return written

    async def close(self) -> None:
        """Cancel every fetch. A living engine must answer writes until this returns."""
        tasks = list(self._fetches.values())
        for task in tasks:
            if not task.cancelling():  # a second one would cut short how the first is answered
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sink.close()


async def _settled(writes: list[asyncio.Future[bool]]) -> None:
    """Wait for the engine's answers; unlike gather, a cancelled wait cancels none of them."""
    if writes:
        await asyncio.wait(writes)
