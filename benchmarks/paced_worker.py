"""A worker without an engine: every running sequence gets one token per tick of a clock.

    python -m benchmarks.paced_worker --address unix:/PATH --stamps FILE --interval SECONDS

As a real worker does after a step, it gives the tokens of all its sequences to the session
at once; it notes the time of that where the prompt is a number, see benchmarks.token_stamps. Of an
interval of 0 the clock is the session: a step follows as soon as it has taken the one before. Ends
with its standard input.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import grpc
import uvloop

from benchmarks.token_stamps import (
    VOCAB_SIZE,
    Nanoseconds,
    is_number,
    open_stamps,
    request_of,
    token_at,
)
from engine.types import (
    COLOCATED,
    AttemptId,
    FinishReason,
    Load,
    ModelLimits,
    SequenceRequest,
    TokenDelta,
)
from protos.codec import MESSAGE_LIMITS, StartOrder, WorkerInfo
from protos.session_server import SessionServer
from protos.transfer_codec import Transfers

_BLOCKS = 65536
_POLL_S = 0.001
"""How often a session is asked whether it has taken a step."""
_LIMITS = ModelLimits(
    "paced", VOCAB_SIZE, max_model_len=131072, block_size=16, num_blocks=_BLOCKS, max_seqs=1024
)


class PacedService:
    """The WorkerService: keeps what runs, and steps it at every tick."""

    def __init__(self, stamps: Nanoseconds, interval: float) -> None:
        self.sessions = SessionServer(WorkerInfo(1, COLOCATED, _LIMITS, ()), self)
        self._stamps = stamps
        self._interval = interval
        self._running: dict[AttemptId, SequenceRequest] = {}
        self._sent: dict[AttemptId, int] = {}
        self._work = asyncio.Event()

    def start(self, order: StartOrder) -> None:
        """The sequence has its first token at the next tick."""
        self._running[order.attempt] = order.sequences[0]
        self._sent[order.attempt] = 0
        self._work.set()

    def abort(self, attempt: AttemptId) -> None:
        """Send no more of it."""
        self._running.pop(attempt, None)
        self._sent.pop(attempt, None)

    def drain_asked(self) -> None:
        """The benchmark ends this worker."""

    def load(self) -> Load:
        return Load(running=len(self._running), free_blocks=_BLOCKS)

    def transfers(self) -> Transfers:
        return {}

    async def tick(self) -> None:
        """Step at every tick; one that comes late delays those after it, none is made up for."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self._work.wait()
            due = max(due + self._interval, loop.time())
            await asyncio.sleep(due - loop.time())
            # Unsent tokens of a sequence would be merged: one token per message is wanted.
            while self._interval == 0 and self.sessions.unsent:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            self._step()
            if not self._running:
                self._work.clear()

    def _step(self) -> None:
        now = time.monotonic_ns()
        for attempt, sequence in list(self._running.items()):
            index = self._sent[attempt]
            self._sent[attempt] += 1
            last = index + 1 == sequence.sampling.max_tokens
            if is_number(sequence.prompt):
                self._stamps[request_of(sequence.prompt), index] = now
            finish = FinishReason.LENGTH if last else None
            self.sessions.tokens(TokenDelta(sequence.id, index, (token_at(index),), finish=finish))
            if last:
                self.sessions.forget(attempt)
                self.abort(attempt)


async def serve(address: str, stamps: Nanoseconds, interval: float) -> None:
    """Until standard input ends."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    service = PacedService(stamps, interval)
    server = grpc.aio.server(options=MESSAGE_LIMITS)
    server.add_generic_rpc_handlers((service.sessions.handler(),))
    server.add_insecure_port(address)
    await server.start()
    ticking = asyncio.create_task(service.tick())
    waiting = asyncio.create_task(ended.wait())
    done, _ = await asyncio.wait((ticking, waiting), return_when=asyncio.FIRST_COMPLETED)
    await server.stop(grace=0)
    ticking.cancel()
    if ticking in done:
        ticking.result()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paced_worker")
    parser.add_argument("--address", required=True)
    parser.add_argument("--stamps", type=Path, required=True)
    parser.add_argument("--interval", type=float, required=True)
    args = parser.parse_args()
    uvloop.run(serve(args.address, open_stamps(args.stamps), args.interval))


if __name__ == "__main__":
    main()
