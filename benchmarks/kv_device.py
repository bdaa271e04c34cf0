"""The third process of benchmarks.kvtransfer: KV from one device's pool to another device's.

    python -m benchmarks.kv_device FOLDER MIB

Moves MIB mebibytes each time it is asked to, at the Unix socket "device.sock" in FOLDER: a line
says by which way, the answer is a line with the seconds until the KV lay in the other pool. The
devices are two virtual ones of the CPU. Prints "serving" once it does, and ends with its standard
input; with status 1, if a way fails.

"device" and "jax" are fetches between two engines' pools, read and written by the engines' own
programs; both ends of jax are in this process as well. What limits device is the same KV moved by
hand, "at once" or "in chunks" of the engine's size; see benchmarks.kv_by_hand.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import grpc.aio
import jax
import jax.numpy as jnp
import numpy as np
import uvloop

from benchmarks.kv_by_hand import ByHand
from benchmarks.kv_peer import CHUNK_TOKENS, HEADS, LAYERS, LAYOUT, WIDTH, tokens_of
from engine.jax_runner import JaxRunner, PoolSpec
from engine.kernels.choose import choose_kernels
from engine.models.traits import LayerKind, Rope, Traits
from engine.placing import plan_placement
from engine.plan import ExportKV, ImportKV, StepPlan
from engine.sharding import make_mesh, sharding_of
from engine.types import KVArrays
from kvtransfer import (
    SERVER_OPTIONS,
    KVSink,
    KVSource,
    ReleaseCause,
    array_method,
    keep_freed_buffers,
    kv_service_handler,
    serve_device,
)
from kvtransfer.array_transfer import ArrayTransfer

BLOCK_SIZE = 32
_SPARE_BLOCKS = 8
"""Of each pool, which the KV leaves free."""
_MODEL = Traits(
    hidden=64, heads=HEADS, kv_heads=HEADS, head_dim=WIDTH, ffn=64, vocab=2, norm_eps=1e-5,
    kinds=(LayerKind(),) * LAYERS, ropes=(Rope(1e4, WIDTH),), score_scale=1.0, tied=True,
)  # fmt: skip
"""One that has such KV; it computes nothing here."""

Run = Callable[[], Awaitable[float]]


class Holder:
    """One engine's pool, and the slots in it where the KV lies or is to lie."""

    def __init__(self, device: jax.Device, tokens: int, seed: int) -> None:
        blocks = -(-tokens // BLOCK_SIZE) + _SPARE_BLOCKS
        table = np.random.default_rng(seed).permutation(blocks).astype(np.int32)
        places = table[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int32)
        self.pool_slots, self.slots = places.size, places.reshape(-1)[:tokens]
        self.kernels = choose_kernels(device.platform, "auto")
        mesh = make_mesh([device])
        self._runner = JaxRunner(
            {"final_norm": jnp.ones(1, device=sharding_of((None,), mesh))},
            plan_placement(_MODEL, self.kernels, mesh, np.float32),
            PoolSpec(blocks, BLOCK_SIZE, np.float32),
            (),
            max_seqs=1,
            max_model_len=1,
            chunk_tokens=CHUNK_TOKENS,
        )
        self._runner.warm_up()

    def read(self, start: int, stop: int, on_device: bool) -> KVArrays:
        plan = StepPlan((ExportKV(0, start, stop, self.slots[start:stop], on_device),))
        return self._runner.run(plan).exported[0]

    def write(self, start: int, stop: int, arrays: KVArrays) -> None:
        self._runner.run(StepPlan((ImportKV(0, start, self.slots[start:stop], arrays),)))

    def wait(self) -> None:
        self._runner.wait()


class Fetches:
    """Transfers from one holder to another through a source and a sink."""

    def __init__(self, tokens: int) -> None:
        here, there = jax.devices()
        self._tokens = tokens
        self.origin, self.goal = Holder(here, tokens, seed=0), Holder(there, tokens, seed=1)
        for start, stop in self._chunks():
            self.origin.write(start, stop, _kv(start, stop))
        self._number = 0
        self.source = KVSource(LAYOUT, self._read, self._released, chunk_tokens=CHUNK_TOKENS)
        self.sink = KVSink(LAYOUT, arrays=ArrayTransfer("127.0.0.1", [there]))
        self.parked = ArrayTransfer("127.0.0.1", [here])

    def _chunks(self) -> list[tuple[int, int]]:
        starts = range(0, self._tokens, CHUNK_TOKENS)
        return [(start, min(start + CHUNK_TOKENS, self._tokens)) for start in starts]

    async def _read(self, transfer_id: bytes, start: int, stop: int, on_device: bool) -> KVArrays:
        return self.origin.read(start, stop, on_device)

    def _released(self, transfer_id: bytes, cause: ReleaseCause) -> None:
        """The next is offered when it is fetched."""

    async def run(self, uri: str) -> float:
        """The seconds from the pull until the last token's KV lies in the other pool."""
        self._number += 1
        transfer_id = self._number.to_bytes(8, "big")
        self.source.offer(transfer_id)
        self.source.admit(transfer_id, self._tokens)
        self.source.finish(transfer_id, b"")
        fetch = self.sink.fetch([uri], transfer_id)
        await fetch.admitted()
        began = time.perf_counter()
        async for chunk in fetch.chunks():
            self.goal.write(chunk.start, chunk.stop, tuple(chunk.arrays))
            chunk.release()
        self.goal.wait()
        seconds = time.perf_counter() - began
        await fetch.close(done=True)
        return seconds

    def check(self) -> None:
        """Raises RuntimeError unless the last run has brought all; forgets it then."""
        for start, stop in self._chunks():
            found = self.goal.read(start, stop, on_device=False)
            if not all(map(np.array_equal, found, _kv(start, stop))):
                raise RuntimeError(f"the KV of tokens [{start}, {stop}) has not arrived")
            self.goal.write(start, stop, tuple(np.zeros_like(array) for array in found))


def _kv(start: int, stop: int) -> KVArrays:
    rng = np.random.default_rng(start)
    return tuple(rng.standard_normal(s.shape(stop - start), np.float32) for s in LAYOUT.arrays)


@asynccontextmanager
async def _ways(folder: Path, tokens: int) -> AsyncIterator[dict[str, Run]]:
    fetches = Fetches(tokens)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(fetches.source.close)
        local = serve_device(fetches.source, "pool")
        stack.push_async_callback(local.close)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        more = array_method(fetches.source, fetches.parked)
        server.add_generic_rpc_handlers((kv_service_handler(fetches.source, more),))
        server.add_insecure_port(f"unix:{folder}/arrays.sock")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        stack.push_async_callback(fetches.sink.close)
        ways: dict[str, Run] = {}
        for way, uri in ("device", local.uri), ("jax", f"jax+unix://{folder}/arrays.sock"):
            ways[way] = partial(fetches.run, uri)
            await ways[way]()
            fetches.check()
        origin, goal = fetches.origin, fetches.goal
        by_hand = ByHand(
            origin.kernels, (LAYERS, origin.pool_slots, HEADS, WIDTH), origin.slots, goal.slots
        )
        for way, size in ("in chunks", CHUNK_TOKENS), ("at once", tokens):
            ways[way] = partial(_in_turn, by_hand, size)
            await ways[way]()
            by_hand.check()
        yield ways


async def _in_turn(by_hand: ByHand, chunk_tokens: int) -> float:
    return by_hand.run(chunk_tokens)


async def _main(folder: Path, mib: int) -> None:
    keep_freed_buffers()  # as a worker
    jax.config.update("jax_num_cpu_devices", 2)
    async with _ways(folder, tokens_of(mib)) as ways:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while line := await reader.readline():
                    seconds = await ways[line.decode().strip()]()
                    writer.write(f"{seconds!r}\n".encode())
            except Exception:
                traceback.print_exc()
                os._exit(1)
            writer.close()

        server = await asyncio.start_unix_server(answer, folder / "device.sock")
        print("serving", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        server.close()


if __name__ == "__main__":
    uvloop.run(_main(Path(sys.argv[1]), int(sys.argv[2])))
    os._exit(0)  # a transfer server's threads may still wait for a pull
