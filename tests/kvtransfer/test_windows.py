"""Windowed layers' KV travels as far back as its reader will see it, and no further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtransfer import ArraySpec, KVLayout, LayoutMismatch
from kvtransfer.errors import ProtocolError
from kvtransfer.messages import PROTOCOL_VERSION, Claim, from_header, to_header
from tests.kvtransfer.harness import CHUNK, TRANSPORTS, Owner, linked, on_a_device

A = b"a"
REACH = 5
WHOLE = KVLayout(
    "windows", (ArraySpec("k", "float32", 3, 2, 5), ArraySpec("v", "int8", 3, 2, 5)), 2
)
"""One layer of three sees the whole context, and its end keeps the KV of all."""
WINDOWED = replace(WHOLE, reach=REACH)
ALL_WINDOWED = replace(WHOLE, windowed_layers=3, reach=REACH)


async def read_whole_context(
    transfer_id: bytes, start: int, stop: int, on_device: bool
) -> Sequence[Any]:
    arrays = [array[:1] for array in Owner(WHOLE).kv(transfer_id, start, stop)]
    return [on_a_device(array) for array in arrays] if on_device else arrays


async def received(
    transport: str, source: KVLayout, sink: KVLayout, tokens: int, from_token: int = 0
) -> list[tuple[int, int, bool]]:
    """(start, stop, of all layers) of each chunk, whose arrays are checked."""
    chunks = []
    async with linked(transport, source, sink, read_whole_context=read_whole_context) as link:
        link.publish(A, tokens)
        fetch = link.fetch(A)
        assert await fetch.admitted() == tokens
        async for chunk in fetch.chunks(from_token):
            wanted = link.owner.kv(A, chunk.start, chunk.stop)
            for array, want in zip(chunk.arrays, wanted, strict=True):
                layers = want if chunk.windowed else want[:1]
                got = np.asarray(array)[:, : chunk.stop - chunk.start]
                assert got.tobytes() == layers.tobytes()
            chunks.append((chunk.start, chunk.stop, chunk.windowed))
            chunk.release()
        assert fetch.trailer == b"first"
        await fetch.close(done=True)
        sent = sum(
            (stop - start) * (WHOLE.bytes_per_token // (1 if whole else 3))
            for start, stop, whole in chunks
        )
        for counts in (link.source.counts(), link.sink.counts()):
            assert sum(each.bytes for each in counts.values()) == sent
    return chunks


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("source", [WHOLE, WINDOWED], ids=["all kept", "let go"])
async def test_windowed_layers_come_for_the_last_tokens_alone(
    transport: str, source: KVLayout
) -> None:
    """The token after 20 sees those from 16 on."""
    assert CHUNK == 8
    wanted = [(0, 8, False), (8, 16, False), (16, 20, True)]
    assert await received(transport, source, WINDOWED, 20) == wanted
    wanted = [(0, 8, False), (8, 15, False), (15, 16, True), (16, 19, True)]
    assert await received(transport, source, WINDOWED, 19) == wanted


async def test_what_the_reader_has_already_is_left_out() -> None:
    assert await received("shm", WHOLE, WINDOWED, 20, 10) == [(10, 16, False), (16, 20, True)]
    assert await received("shm", WHOLE, WINDOWED, 20, 18) == [(18, 20, True)]
    assert await received("shm", WHOLE, WINDOWED, 20, 20) == []


async def test_a_short_prompt_is_within_the_window() -> None:
    assert await received("shm", WINDOWED, WINDOWED, 4) == [(0, 4, True)]


async def test_where_all_layers_are_windowed_nothing_else_travels() -> None:
    assert await received("shm", ALL_WINDOWED, ALL_WINDOWED, 20) == [(16, 20, True)]
    assert await received("shm", ALL_WINDOWED, ALL_WINDOWED, 20, 17) == [(17, 20, True)]


async def test_a_reader_that_keeps_all_takes_all() -> None:
    chunks = await received("shm", WHOLE, WHOLE, 20)
    assert chunks == [(0, 8, True), (8, 16, True), (16, 20, True)]


@pytest.mark.parametrize(
    "sink", [WHOLE, replace(WINDOWED, reach=6), replace(WINDOWED, windowed_layers=1)]
)
async def test_who_lacks_what_its_reader_keeps_refuses(sink: KVLayout) -> None:
    async with linked("shm", WINDOWED, sink, read_whole_context=read_whole_context) as link:
        link.publish(A, 20)
        fetch = link.fetch(A)
        with pytest.raises(LayoutMismatch, match="the last 5 tokens of 2 windowed layers"):
            await fetch.admitted()
        await fetch.close(done=False)
        link.source.withdraw(A, "")


def test_layouts_travel_whole() -> None:
    for layout in (WHOLE, WINDOWED, ALL_WINDOWED):
        claim = Claim(PROTOCOL_VERSION, A, 0, layout)
        assert from_header(to_header(claim)) == claim


@pytest.mark.parametrize("changes", [{"windowed_layers": 4}, {"windowed_layers": 0}])
def test_layouts_that_make_no_sense_are_refused(changes: dict[str, int]) -> None:
    header = to_header(Claim(PROTOCOL_VERSION, A, 0, WINDOWED))
    header["layout"] |= changes
    with pytest.raises(ProtocolError, match=f"{changes['windowed_layers']} windowed layers"):
        from_header(header)
