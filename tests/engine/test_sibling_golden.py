"""A real model gives each choice the same tokens, whether it shares the prompt with others."""

from __future__ import annotations

import pytest

from engine.events import Add, Event
from engine.types import COLOCATED
from tests.engine.helpers import deltas_of, request, run
from tests.engine.test_prefix_golden import ANSWERS, LONGEST, engine_of

COUNT = 5


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_choices_of_a_group_are_those_of_lone_sequences(kernels: str) -> None:
    prompts = [tuple(each["prompt"]) for each in (ANSWERS[0], ANSWERS[-1])] + [tuple(LONGEST)]

    def outputs(grouped: bool) -> list[tuple[int, ...]]:
        engine = engine_of(kernels, COLOCATED, None, max_waiting=64)
        for number, prompt in enumerate(prompts):
            for choice in range(COUNT):
                engine.submit(Add(request(
                    f"{number}-{choice}", prompt, choice=choice, seed=number, temperature=1.0,
                    max_tokens=12, group=b"%016d" % number if grouped else b"",
                )))  # fmt: skip
        events: list[Event] = run(engine)
        return [
            tuple(t for d in deltas_of(events, f"{number}-{choice}", choice) for t in d.tokens)
            for number in range(len(prompts))
            for choice in range(COUNT)
        ]

    shared = outputs(grouped=True)
    assert shared == outputs(grouped=False)
    assert len(set(shared)) > len(prompts), "choices differ"
