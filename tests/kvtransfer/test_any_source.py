"""A reader outlives whatever a source says: what it took is right, or it is told why not."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer import KVTransferError
from kvtransfer.messages import Admitted, End, Failed, Pull, Released
from tests.kvtransfer.harness import Pipe
from tests.kvtransfer.test_forgery import CLAIM, answer, forge_chunk, open_fetch, taken

TOKENS = 20
SPANS = [(0, 8), (8, 16), (16, 20)]
SAYINGS = st.sampled_from(
    [
        (Admitted(TOKENS, 2), ()),
        (End(b"t"), ()),
        (Released(), ()),
        (Failed("aborted", "why"), ()),
        (Pull(0), ()),
        *[forge_chunk(*span) for span in SPANS],
        forge_chunk(0, 4),
    ]
)
GOOD = [(Admitted(TOKENS, 2), ()), *[forge_chunk(*span) for span in SPANS], (End(b"t"), ())]


@st.composite
def scripts(draw: st.DrawFn) -> list:
    """Anything; or what is right, with something repeated, left out or exchanged."""
    if draw(st.booleans()):
        return draw(st.lists(SAYINGS, max_size=12))
    script = list(GOOD)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(script)))
        script[at : at + draw(st.integers(0, 1))] = draw(st.lists(SAYINGS, max_size=1))
    return script


async def play(script: list) -> object:
    ours, theirs = Pipe.pair()
    fetch = open_fetch(ours)
    assert (await theirs.recv()).message == CLAIM
    taking = asyncio.create_task(taken(fetch))
    for message, payload in script:
        for _ in range(6):
            await asyncio.sleep(0)
        await theirs.send(message, payload)
    for _ in range(6):
        await asyncio.sleep(0)
    await theirs.close()
    (spans,) = await asyncio.gather(taking, return_exceptions=True)
    if isinstance(spans, list):
        assert spans == SPANS
        assert fetch.trailer == b"t"
    else:
        assert isinstance(spans, KVTransferError)
    async with asyncio.timeout(5):
        await fetch.close(done=False)
        await answer(theirs)
    return spans


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scripts())
def test_any_sequence_ends_the_fetch(script: list) -> None:
    asyncio.run(play(script))


def test_what_is_right_is_taken() -> None:
    assert asyncio.run(play(GOOD)) == SPANS
