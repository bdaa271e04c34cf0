from __future__ import annotations

from typing import Any

import pytest

from engine.types import SamplingParams
from router.sampling import usable_defaults
from tests.router.conftest import Client
from tests.router.fakes import VOCAB, ScriptedGenerator, batches


async def sampled(client: Client, generator: ScriptedGenerator, **fields: Any) -> SamplingParams:
    generator.script = batches("x")
    await client.complete(**fields)
    return generator.calls[-1].sampling


async def test_all_fields_reach_the_workers(client: Client, generator: ScriptedGenerator) -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "seed": 9,
        "max_tokens": 3,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
        "logit_bias": {"7": -100, "3": 1.5, "9": 0},
        "logprobs": 4,
    }
    assert await sampled(client, generator, **fields) == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        seed=9,
        max_tokens=3,
        stop_token_ids=frozenset({5}),
        min_tokens=2,
        logit_bias=((3, 1.5), (7, -100.0)),
        top_logprobs=4,
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": VOCAB}, {"top_k": 0}),
        ({"top_k": 10**30}, {"top_k": 0}),
        ({"top_p": 0}, {"top_k": 1, "top_p": 1.0}),
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"seed": 2**64 + 5}, {"seed": 5}),
    ],
)
async def test_values_are_resolved(
    client: Client, generator: ScriptedGenerator, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    sampling = await sampled(client, generator, **fields)
    assert {name: getattr(sampling, name) for name in expected} == expected


async def test_an_absent_seed_is_drawn(client: Client, generator: ScriptedGenerator) -> None:
    seeds = {(await sampled(client, generator)).seed for _ in range(3)}
    assert len(seeds) == 3


def test_defaults_that_are_out_of_range_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    good = {"temperature": 0.6, "top_p": 1, "top_k": 20.0, "min_p": 0.0}
    assert usable_defaults(good) == good
    assert not caplog.text
    bad = {"temperature": 2.5, "top_p": -0.1, "top_k": 1.5, "repetition_penalty": 0}
    assert usable_defaults({**bad, "min_p": float("nan")}) == {}
    assert "generation_config.json: repetition_penalty must be a number" in caplog.text
    assert len(caplog.records) == 5


async def test_the_models_defaults_are_for_absent_fields(
    client: Client, generator: ScriptedGenerator
) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    client = client.with_context(generation_defaults=defaults)
    sampling = await sampled(client, generator)
    assert {name: getattr(sampling, name) for name in defaults} == defaults
    sampling = await sampled(client, generator, temperature=0, top_k=-1)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 0, 0.9)
