"""A real model answers the same, token for token in float32, whether its prefixes are cached."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.engine import Engine
from engine.events import Add
from engine.jax_runner import JaxRunner
from engine.loading import load_params
from engine.models.families import traits_of
from engine.types import COLOCATED, Role
from tests.engine.helpers import deltas_of, hand_over, request, run
from tests.engine.tiny import MAX_MODEL_LEN, make_runner, tiny_engine, tiny_placement

FOLDER = Path(__file__).parent.parent / "golden" / "tiny" / "tied_llama3"
ANSWERS: list[dict[str, Any]] = json.loads((FOLDER / "answers.json").read_text())
SIZE = 8
MORE = 9
LONGEST = max((each["prompt"] for each in ANSWERS), key=len)


@functools.cache
def runner_of(kernels: str, roles: Role) -> JaxRunner:
    traits = traits_of(json.loads((FOLDER / "config.json").read_text()))
    placement = tiny_placement(traits, kernels)
    params = load_params(FOLDER, placement, np.float32, MAX_MODEL_LEN)
    return make_runner(params, placement, roles, SIZE)


def engine_of(kernels: str, roles: Role, hit_tokens: int | None, **limits: int) -> Engine:
    traits = traits_of(json.loads((FOLDER / "config.json").read_text()))
    runner = runner_of(kernels, roles)
    return tiny_engine(runner, traits.vocab, hit_tokens=hit_tokens, **limits)  # type: ignore[arg-type]


def prompts() -> list[tuple[int, ...]]:
    """The golden ones, each also as one that goes on from another."""
    known = [tuple(each["prompt"]) for each in ANSWERS]
    return [*known, *((*LONGEST[: len(prompt)], *prompt[:MORE]) for prompt in known), *known]


def chat(engine: Engine, *, together: bool) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of all prompts, then of a second turn of each."""
    answers: list[tuple[list[int], list[float]]] = []
    turns = [prompts(), []]
    for number, turn in enumerate(turns):
        asked = [
            request(f"{number}-{i}", p, temperature=0.0, max_tokens=12, top_logprobs=0)
            for i, p in enumerate(turn)
        ]
        events = []
        for each in asked:
            engine.submit(Add(each))
            if not together:
                events += run(engine)
        events += run(engine)
        for i, each in enumerate(asked):
            deltas = deltas_of(events, f"{number}-{i}")
            tokens = [token for d in deltas for token in d.tokens]
            answers.append((tokens, [p.logprob for d in deltas for p in d.logprobs or ()]))
            if number == 0:
                turns[1].append((*each.prompt, *tokens, 5))
    return answers


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_answers_are_the_same_with_the_cache(kernels: str, together: bool) -> None:
    cached, cold = (engine_of(kernels, COLOCATED, hit, max_waiting=64) for hit in (SIZE, None))
    with_cache, without = chat(cached, together=together), chat(cold, together=together)
    assert [tokens for tokens, _ in with_cache] == [tokens for tokens, _ in without]
    for (_, found), (_, wanted) in zip(with_cache, without, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    load = cached.load()
    assert load.prefix_hits > load.prefix_queries / 4


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_answers_are_the_same_where_only_the_rest_is_handed_over(kernels: str) -> None:
    prefill = engine_of(kernels, Role.PREFILL, SIZE)
    decode = engine_of(kernels, Role.DECODE, SIZE)
    for number in range(2):
        for i, each in enumerate(ANSWERS):
            prompt = tuple(each["prompt"])
            greedy = {"temperature": 0.0, "max_tokens": len(each["output"])}
            name = f"{number}-{i}"
            make = functools.partial(request, name, prompt, transfer_id=name.encode(), **greedy)
            start = number * (len(prompt) // SIZE * SIZE)
            deltas = hand_over(prefill, decode, make, piece=SIZE, start=start)
            assert [token for d in deltas for token in d.tokens] == each["output"]
    assert prefill.load().prefix_hits > 0
