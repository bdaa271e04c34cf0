"""Arrays between processes by jax.experimental.transfer: their pieces, and peers that fail."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvtransfer import (
    IntegrityError,
    ProtocolError,
    SourceUnreachable,
    TransferTimeout,
    array_transfer,
)
from kvtransfer.array_transfer import ArrayTransfer
from kvtransfer.frames import encode_header
from kvtransfer.jax_transport import _ReaderChannel
from kvtransfer.layout import ArraySpec, KVLayout
from kvtransfer.messages import Admitted, Message, Parked
from kvtransfer.payload import array_headers, chunk_header

LAYOUT = KVLayout("t", (ArraySpec("k", "bfloat16", 2, 4, 8), ArraySpec("v", "float32", 2, 4, 8)))
TOKENS, PADDED = 5, 6
ROOT = Path(__file__).parents[2]


@functools.cache
def end(devices: int) -> ArrayTransfer:
    """One that has the last `devices` devices."""
    return ArrayTransfer("localhost", jax.devices()[-devices:])


def chunk() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal((2, PADDED, 4, 8)).astype(s.numpy_dtype) for s in LAYOUT.arrays]


def laid_out(array: np.ndarray, devices: int, *, by_heads: bool) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("heads",))
    spec = PartitionSpec(None, None, "heads", None) if by_heads else PartitionSpec()
    return jax.device_put(array, NamedSharding(mesh, spec))


@pytest.mark.parametrize("by_heads", [True, False], ids=["by heads", "replicated"])
@pytest.mark.parametrize("decode", [1, 2, 4])
@pytest.mark.parametrize("prefill", [1, 2, 4])
async def test_arrays_arrive_from_any_number_of_devices_on_any(
    prefill: int, decode: int, by_heads: bool
) -> None:
    wanted = chunk()
    parked = end(4).park([laid_out(array, prefill, by_heads=by_heads) for array in wanted])
    assert (parked.pieces, parked.tokens) == (prefill if by_heads else 1, PADDED)
    pulled = await end(decode).pull(parked, array_headers(LAYOUT, TOKENS))
    for got, array in zip(pulled, wanted, strict=True):
        assert got.dtype == array.dtype
        assert np.asarray(got).tobytes() == array.tobytes()
        if isinstance(got, jax.Array):
            assert got.sharding.device_set <= set(jax.devices()[-decode:])
            assert len(got.sharding.device_set) == parked.pieces
        else:
            assert parked.pieces > decode


async def test_arrays_of_numpy_are_parked_too() -> None:
    """The fake model's are."""
    wanted = chunk()
    pulled = await end(1).pull(end(2).park(wanted), array_headers(LAYOUT, TOKENS))
    assert [np.asarray(got).tobytes() for got in pulled] == [array.tobytes() for array in wanted]


SOURCE = """
import sys
import jax, numpy as np
from kvtransfer.array_transfer import ArrayTransfer
end = ArrayTransfer("127.0.0.1", jax.devices())
for _ in range(2):
    parked = end.park([np.ones((2, 6, 4, 8), spec) for spec in ("bfloat16", "float32")])
    print(parked.uuid, parked.address, parked.pieces, parked.tokens, flush=True)
sys.stdin.read()
"""


async def test_a_source_that_dies_is_noticed() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"import ml_dtypes\n{SOURCE}", stdin=PIPE, stdout=PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    parked = []
    for _ in range(2):
        uuid, address, pieces, tokens = (await process.stdout.readline()).decode().split()
        parked.append(Parked(int(uuid), address, int(pieces), int(tokens)))
    for got in await end(1).pull(parked[0], array_headers(LAYOUT, TOKENS)):
        assert np.all(np.asarray(got).astype(np.float32) == 1)
    process.kill()
    await process.wait()
    with pytest.raises(SourceUnreachable, match="pulling a chunk failed"):
        await end(1).pull(parked[1], array_headers(LAYOUT, TOKENS))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "nowhere", "a:b", "x" * 300 + ":1"])
async def test_a_transfer_server_that_is_not_there_is_noticed_at_once(address: str) -> None:
    async with asyncio.timeout(2):
        with pytest.raises(SourceUnreachable, match="no transfer server at"):
            await end(1).pull(Parked(1, address, 1, PADDED), array_headers(LAYOUT, TOKENS))


async def test_a_pull_that_does_not_return_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a stand-in: a real one would end the test run with an abort."""
    release = threading.Event()
    parked = replace(PARKED, address=end(4)._server.address())
    monkeypatch.setattr(array_transfer, "PULL_S", 0.05)
    monkeypatch.setattr(ArrayTransfer, "_pull", lambda *_: release.wait(30))
    with pytest.raises(TransferTimeout, match=r"not pulled within 0\.05 s"):
        await end(2).pull(parked, array_headers(LAYOUT, TOKENS))
    release.set()


def test_a_host_without_an_address_is_an_error() -> None:
    with pytest.raises(OSError, match=r"."):
        ArrayTransfer("no-such-host.invalid", jax.devices()[:1])


class _Call:
    """A call whose other end has sent `messages`."""

    def __init__(self, messages: list[Message]) -> None:
        self._frames = [encode_header(message) for message in messages]

    async def read(self) -> bytes:
        return self._frames.pop(0)


GOOD = chunk_header(LAYOUT, 0, 0, TOKENS, 0)
PARKED = Parked(1, "127.0.0.1:1", 2, PADDED)


@pytest.mark.parametrize(
    ("messages", "error", "says"),
    [
        ([GOOD], ProtocolError, "parked nowhere"),
        ([PARKED, Admitted(1, 1)], ProtocolError, "parked for Admitted"),
        ([replace(PARKED, tokens=TOKENS - 1), GOOD], ProtocolError, "5 tokens in arrays of 4"),
        ([replace(PARKED, tokens=2**30), GOOD], ProtocolError, "padded to"),
        ([replace(PARKED, pieces=3), GOOD], ProtocolError, "4 heads in 3 pieces"),
        ([PARKED, replace(GOOD, arrays=GOOD.arrays[::-1])], IntegrityError, "layout"),
        ([PARKED, replace(GOOD, heads=(0, 2))], IntegrityError, "heads"),
    ],
)
async def test_a_source_that_lies_is_found_out_before_anything_is_pulled(
    messages: list[Message], error: type[Exception], says: str
) -> None:
    channel = _ReaderChannel(_Call(messages), end(1), LAYOUT)
    with pytest.raises(error, match=says):
        await channel.recv()
