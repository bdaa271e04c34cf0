"""What many choices of a long prompt cost the loop when they start."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from engine.block_hash import block_hashes, root_hash
from engine.types import (
    COLOCATED,
    AttemptId,
    ModelLimits,
    SamplingParams,
    SequenceId,
    SequenceRequest,
)
from protos.codec import StartOrder, WorkerInfo, encode_start
from protos.token_codec import pack_prompt, pack_tokens
from router import cached_prefixes
from router.cached_prefixes import CachedPrefixes
from router.fleet import Fleet
from tests.router.conftest import Client
from tests.router.fakes import Pause, ScriptedGenerator
from tests.services.scene import FakeWorker


async def test_other_requests_have_a_turn_between_the_starts(
    client: Client, generator: ScriptedGenerator
) -> None:
    pause = Pause()
    generator.script = [[97], pause, [256]]
    asking = asyncio.create_task(client.complete(prompt="p", n=20))
    started: list[int] = []
    while not started or started[-1] < 20:
        await asyncio.sleep(0)
        started.append(len(generator.calls))
    assert max(after - before for before, after in itertools.pairwise(started)) == 1
    pause.event.set()
    await asking


def test_a_prompts_hashes_are_made_once_until_the_fleet_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []

    def counting(tokens: tuple[int, ...], size: int, root: int) -> list[int]:
        hashed.append(size)
        return block_hashes(tokens, size, root)

    monkeypatch.setattr(cached_prefixes, "block_hashes", counting)
    fleet = Fleet()
    prefixes = CachedPrefixes(fleet)
    prompt = tuple(range(20))

    def check(size: int, model: str) -> None:
        right = block_hashes(prompt[:-1], size, root_hash(model.encode()))
        for _ in range(3):
            assert prefixes.chains(prompt)[size] == right

    def join(size: int, model: str) -> None:
        limits = ModelLimits(model, 97, 64, size, 100, 8)
        fleet.join(FakeWorker("w", COLOCATED), WorkerInfo(1, COLOCATED, limits, ()))  # type: ignore[arg-type]

    join(4, "m")
    check(4, "m")
    assert hashed == [4]
    assert prefixes.chains(tuple(reversed(prompt))) != prefixes.chains(prompt)
    del hashed[:]
    join(8, "m")
    check(4, "m")
    check(8, "m")
    assert sorted(hashed) == [4, 8]
    join(8, "another")
    check(8, "another")
    changing = list(prompt)
    before = prefixes.chains(changing)
    changing[0] += 1
    assert prefixes.chains(changing) != before


def test_a_prompt_is_packed_once() -> None:
    prompt, other = tuple(range(1000)), tuple(range(1001))
    packed = pack_prompt(prompt)
    assert packed == pack_tokens(prompt)
    assert pack_prompt(prompt) is packed
    assert pack_prompt(other) == pack_tokens(other)
    attempt = AttemptId("r", 0)
    sequence = SequenceRequest(
        SequenceId(attempt, 0), COLOCATED, prompt, SamplingParams(), (), b"", 0
    )
    assert encode_start(StartOrder(attempt, (sequence,), ())).prompt == packed
