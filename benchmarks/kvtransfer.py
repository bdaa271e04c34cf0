"""KV transfers between processes and between devices, each transport beside its own limit.

    python -m benchmarks.kvtransfer [--sizes 1,16,64,256] [--rounds 5] [--json FILE] [--check]

A round fetches the KV once by each transport, copies every chunk to where it shall stay, and
measures the limits beside it. What limits shm is one copy of everything into a buffer and one out
of it, one after the other, in one process; gRPC, a stream over the same kind of socket, with a
raw socket shown as well. Between two engines' pools in one process it
fetches by device, beside the same KV moved by hand in jax.numpy, at once or in chunks, whichever
is faster; and by jax, which has no target. A share is the median of the rounds' ratios: 1.00 is
as fast as the limit.

shm is timed as workers use it: the reader has pulled while the prompt was being computed, and
waits; the time runs from when the KV is computed until the reader has all of it. For a reader
that comes late, "shm pulled" runs from the pull on, as grpc does: one more wake-up of a process.

Targets hold beside the limit wherever this machine lets anything reach it that does the work. One
process that copies wakes nobody: two bare ones that do the same and no more ("bare pair") stand
beside shm. A bare stream neither packs KV nor checks it: one that does just that ("packed grpc")
stands beside gRPC. Where these floors miss the target, the transport must reach the same share of
them instead.

Checksums are on, as always.

Exit status: 0; with --check, 1 when a share is below its target; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from pathlib import Path

import grpc.aio
import numpy as np
import uvloop
from rich.console import Console

from benchmarks.kv_bare import BareReader
from benchmarks.kv_peer import (
    BARE_METHOD,
    DIGEST,
    GRPC,
    LAYOUT,
    PACKED_METHOD,
    PIECE,
    PUBLISHED,
    PULLED,
    TOKEN_BYTES,
    chunks_of,
    tokens_of,
    transfer_id,
)
from benchmarks.kv_report import BETWEEN_DEVICES, WAYS, Measured, share_table, speed_table
from benchmarks.logged_process import StartError, running_module
from benchmarks.report import print_line
from benchmarks.stats import host_info
from kvtransfer import CHANNEL_OPTIONS, KVSink, keep_freed_buffers
from kvtransfer.payload import array_headers, as_array, checksum, places_of

_PIPE_WIDTH = 140
_START_S = 60.0
_ORDER = (
    "shm", "copies", "bare pair", "device", "grpc", "at once", "bare grpc", "in chunks",
    "shm pulled", "bare pair pulled", "packed grpc", "raw socket", "jax",
)  # fmt: skip
"""Of a round. Between devices, a way right after another one would find its caches warm."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    out = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    keep_freed_buffers()  # as a worker
    try:
        results = [_measure(mib, args.rounds) for mib in args.sizes]
    except StartError as error:
        print_line(out, str(error), style="red")
        return 1
    out.print(speed_table(results))
    out.print(share_table(results))
    if args.json:
        figures = {"host": host_info(), "sizes": [asdict(each) for each in results]}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if not args.check:
        return 0
    missed = [line for each in results for line in each.missed()]
    for line in missed:
        print_line(out, f"missed: {line}", style="red")
    if not missed:
        print_line(out, "check passed", style="green")
    return 1 if missed else 0


def _measure(mib: int, rounds: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="hexserve-") as name, ExitStack() as stack:
        processes = [
            stack.enter_context(running_module(Path(name) / f"{module}.log", module, *arguments))
            for module, *arguments in (
                ("benchmarks.kv_peer", name, str(mib), str(rounds + 1)),
                ("benchmarks.kv_bare", name, str(mib)),
                ("benchmarks.kv_device", name, str(mib)),
            )
        ]
        for process in processes:
            process.wait_for("serving", time.monotonic() + _START_S)
        try:
            return uvloop.run(_rounds(Path(name), mib, rounds))
        except asyncio.IncompleteReadError:  # an answer of theirs
            processes[-1].fail()


async def _rounds(folder: Path, mib: int, rounds: int) -> Measured:
    reader = _Reader(folder, tokens_of(mib))
    measured = Measured(reader.tokens * TOKEN_BYTES / 2**20, {way: [] for way in WAYS})
    async with AsyncExitStack() as stack:
        await reader.connect(stack)
        for round_ in range(rounds + 1):  # the first one warms up
            for way in _ORDER:
                began = time.perf_counter()
                seconds = await reader.take(way, round_)
                if round_:
                    measured.seconds[way].append(seconds or time.perf_counter() - began)
    return measured


class _Reader:
    """What takes `tokens` tokens' KV by every way, into the same memory."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.tokens = tokens
        self._folder = folder
        self._kept = [np.zeros(spec.shape(tokens), np.float32) for spec in LAYOUT.arrays]
        size = tokens * TOKEN_BYTES
        self._source, self._buffer, self._target = (np.ones(size, np.uint8) for _ in range(3))

    async def connect(self, stack: AsyncExitStack) -> None:
        """To the other processes, until `stack` is closed."""
        self._sink = KVSink(LAYOUT)
        stack.push_async_callback(self._sink.close)
        self._bare = BareReader(self._folder)
        stack.callback(self._bare.close)
        # uvloop does not come to an end with an open gRPC channel.
        self._channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(f"unix:{self._folder}/grpc.sock", options=CHANNEL_OPTIONS)
        )
        self._raw, self._devices, self._publisher = [
            await asyncio.open_unix_connection(self._folder / f"{name}.sock", limit=2**22)
            for name in ("raw", "device", "publish")
        ]
        for _, writer in (self._raw, self._devices, self._publisher):
            stack.callback(writer.close)

    async def take(self, way: str, round_: int) -> float | None:
        """Its seconds, or None if they are those of this call."""
        shm, by_grpc = f"shm://{self._folder}/shm.sock", f"grpc+unix://{self._folder}/grpc.sock"
        if way in BETWEEN_DEVICES:
            return float(await _ask(*self._devices, way))
        match way:
            case "shm":
                return await self._fetch(shm, PUBLISHED, round_)
            case "shm pulled":
                return await self._fetch(shm, PULLED, round_)
            case "grpc":
                return await self._fetch(by_grpc, GRPC, round_)
            case "bare pair":
                return self._bare.take(self._kept, published=True)
            case "bare pair pulled":
                return self._bare.take(self._kept, published=False)
            case "copies":
                np.copyto(self._buffer, self._source)
                np.copyto(self._target, self._buffer)
            case "bare grpc":
                await self._take_bare()
            case "packed grpc":
                await self._take_packed()
            case "raw socket":
                await self._take_raw(*self._raw)
        return None

    async def _fetch(self, source: str, fetch_name: bytes, round_: int) -> float:
        """The seconds to the trailer, when all is in its place: from the pull on, or from when
        the KV was published."""
        fetch = self._sink.fetch([source], transfer_id(fetch_name, round_))
        await fetch.admitted()
        if fetch_name is PUBLISHED:
            self._publisher[1].write(b"%d\n" % round_)
        began = time.perf_counter()
        async for chunk in fetch.chunks():
            for target, array in zip(self._kept, chunk.arrays, strict=True):
                np.copyto(target[:, chunk.start : chunk.stop], array)
            chunk.release()
        ended = time.perf_counter()
        await fetch.close(done=True)
        if fetch_name is PUBLISHED:
            began = float(await _ask(*self._publisher, ""))
        return ended - began

    async def _take_bare(self) -> None:
        place = 0
        async for message in self._channel.unary_stream(BARE_METHOD)(b""):
            self._target[place : place + len(message)] = np.frombuffer(message, np.uint8)
            place += len(message)

    async def _take_packed(self) -> None:
        """What a fetch by gRPC does with each chunk, without its protocol."""
        chunks = iter(chunks_of(self.tokens))
        async for message in self._channel.unary_stream(PACKED_METHOD)(b""):
            start, stop = next(chunks)
            headers = array_headers(LAYOUT, stop - start)
            places = places_of(memoryview(message)[DIGEST.size :], headers, alignment=1)
            if checksum(places) != DIGEST.unpack_from(message)[0]:
                raise RuntimeError(f"tokens [{start}, {stop}) are not what was sent")
            for target, place, header in zip(self._kept, places, headers, strict=True):
                np.copyto(target[:, start:stop], as_array(place, header))

    async def _take_raw(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place, target = 0, self._target
        writer.write(b"x")
        while place < len(target):
            data = await reader.read(min(PIECE, len(target) - place))
            if not data:
                raise asyncio.IncompleteReadError(b"", len(target) - place)
            target[place : place + len(data)] = np.frombuffer(data, np.uint8)
            place += len(data)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> str:
    """The other process's answer. IncompleteReadError: it has ended."""
    writer.write(f"{line}\n".encode())
    return (await reader.readuntil()).decode()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.kvtransfer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", type=_sizes, default=(1, 16, 64, 256), help="MiB, as 1,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(argv)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 MiB is wanted")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
