"""KV transfers between processes and between devices, each transport beside its own limit.

    python -m benchmarks.kvtransfer [--sizes 1,16,64,256] [--rounds 5] [--json FILE] [--check]

A round fetches the KV once by each transport, copies every chunk to where it shall stay, and
measures the limits beside it: for shm one copy of everything into a buffer and one out of it, one
after the other, in one process; for gRPC a bare byte stream of the same size over the same kind of
socket; and a raw socket. Between two engines' pools in one process it fetches by device, beside
the same KV moved by hand in jax.numpy, at once or in chunks, whichever is faster; and by jax, which
has no target. A fetch is timed from the pull on: it has been claimed before, while the prompt was
still being computed. A share is the median of the rounds' ratios: 1.00 is as fast as
the limit. Checksums are on, as always.

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
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc.aio
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.kv_peer import BARE_METHOD, LAYOUT, PIECE, TOKEN_BYTES, tokens_of
from benchmarks.logged_process import StartError, running_module
from benchmarks.report import print_line
from benchmarks.stats import host_info, median
from kvtransfer import CHANNEL_OPTIONS, KVSink, keep_freed_buffers

_PIPE_WIDTH = 140
_START_S = 60.0
BETWEEN_DEVICES = ("device", "at once", "in chunks", "jax")
"""What benchmarks.kv_device runs."""
WAYS = ("shm", "copies", "grpc", "bare grpc", "raw socket", *BETWEEN_DEVICES)
_ORDER = (
    "shm", "copies", "device", "grpc", "at once", "bare grpc", "in chunks", "raw socket", "jax"
)  # fmt: skip
"""Of a round. Between devices, a way right after another one would find its caches warm."""
TARGETS = {
    "shm": (("copies",), 0.8),
    "grpc": (("bare grpc",), 0.85),
    "device": (("at once", "in chunks"), 0.9),
}
"""Transport → what limits it, the fastest of these, and the least share of it."""


@dataclass(slots=True)
class Measured:
    """One size: each way's seconds, round by round."""

    mib: float
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def gib_s(self, way: str) -> float:
        return self.mib / 1024 / (median(self.seconds[way]) or 1)

    def limit(self, transport: str) -> str:
        """The way that limits it."""
        return max(TARGETS[transport][0], key=self.gib_s)

    def share(self, transport: str) -> float:
        """Of its limit's speed."""
        limit = self.limit(transport)
        pairs = zip(self.seconds[limit], self.seconds[transport], strict=True)
        return median(bound / own for bound, own in pairs) or 0.0

    def missed(self) -> list[str]:
        return [
            f"{transport} at {self.mib:.0f} MiB: {self.share(transport):.2f} of "
            f"{self.limit(transport)}, target {least:.2f}"
            for transport, (_, least) in TARGETS.items()
            if self.share(transport) < least
        ]


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
    out.print(_table(results))
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
    transfers = 2 * (rounds + 1)
    with (
        tempfile.TemporaryDirectory(prefix="hexserve-") as name,
        running_module(
            Path(name) / "peer.log", "benchmarks.kv_peer", name, str(mib), str(transfers)
        ) as peer,
        running_module(
            Path(name) / "device.log", "benchmarks.kv_device", name, str(mib)
        ) as devices,
    ):
        for process in (peer, devices):
            process.wait_for("serving", time.monotonic() + _START_S)
        try:
            return uvloop.run(_rounds(Path(name), mib, rounds))
        except asyncio.IncompleteReadError:  # an answer of theirs
            devices.fail()


async def _rounds(folder: Path, mib: int, rounds: int) -> Measured:
    tokens = tokens_of(mib)
    measured = Measured(tokens * TOKEN_BYTES / 2**20, {way: [] for way in WAYS})
    kept = [np.zeros(spec.shape(tokens), np.float32) for spec in LAYOUT.arrays]
    source, buffer, target = (np.ones(tokens * TOKEN_BYTES, np.uint8) for _ in range(3))
    sink = KVSink(LAYOUT)
    endpoints = {"shm": f"shm://{folder}/shm.sock", "grpc": f"grpc+unix://{folder}/grpc.sock"}
    bare = grpc.aio.insecure_channel(f"unix:{folder}/grpc.sock", options=CHANNEL_OPTIONS)
    raw = await asyncio.open_unix_connection(folder / "raw.sock", limit=2**22)
    devices = await asyncio.open_unix_connection(folder / "device.sock")
    number = 0
    try:
        for round_ in range(rounds + 1):  # the first one warms up
            for way in _ORDER:
                began = time.perf_counter()
                seconds = None
                if way in endpoints:
                    seconds = await _fetch(sink, endpoints[way], number.to_bytes(8, "big"), kept)
                    number += 1
                elif way in BETWEEN_DEVICES:
                    seconds = await _ask(*devices, way)
                elif way == "copies":
                    np.copyto(buffer, source)
                    np.copyto(target, buffer)
                elif way == "bare grpc":
                    await _take_bare(bare, target)
                else:
                    await _take_raw(*raw, target)
                if round_:
                    measured.seconds[way].append(seconds or time.perf_counter() - began)
    finally:  # uvloop does not come to an end with an open gRPC channel
        for _, writer in (raw, devices):
            writer.close()
        await bare.close()
        await sink.close()
    return measured


async def _fetch(sink: KVSink, source: str, transfer_id: bytes, kept: list[np.ndarray]) -> float:
    """The seconds from the pull to the trailer, when all is in its place."""
    fetch = sink.fetch([source], transfer_id)
    await fetch.admitted()
    began = time.perf_counter()
    async for chunk in fetch.chunks():
        for target, array in zip(kept, chunk.arrays, strict=True):
            np.copyto(target[:, chunk.start : chunk.stop], array)
        chunk.release()
    seconds = time.perf_counter() - began
    await fetch.close(done=True)
    return seconds


async def _take_bare(channel: grpc.aio.Channel, target: np.ndarray) -> None:
    place = 0
    async for message in channel.unary_stream(BARE_METHOD)(b""):
        target[place : place + len(message)] = np.frombuffer(message, np.uint8)
        place += len(message)


async def _take_raw(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: np.ndarray
) -> None:
    place = 0
    writer.write(b"x")
    while place < len(target):
        data = await reader.read(min(PIECE, len(target) - place))
        if not data:
            raise asyncio.IncompleteReadError(b"", len(target) - place)
        target[place : place + len(data)] = np.frombuffer(data, np.uint8)
        place += len(data)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> float:
    """The seconds that `way` took in benchmarks.kv_device. IncompleteReadError: it has ended."""
    writer.write(f"{way}\n".encode())
    return float((await reader.readuntil()).decode())


def _table(results: list[Measured]) -> Table:
    table = Table(title="KV transfers, GiB/s")
    table.add_column("MiB", justify="right")
    for way in WAYS:
        table.add_column(way, justify="right")
    for transport, (limits, least) in TARGETS.items():
        table.add_column(f"{transport} / {' or '.join(limits)} (≥ {least})", justify="right")
    for each in results:
        table.add_row(
            f"{each.mib:.0f}",
            *(f"{each.gib_s(way):.2f}" for way in WAYS),
            *(f"{each.share(transport):.2f}" for transport in TARGETS),
        )
    return table


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
