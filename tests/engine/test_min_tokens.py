"""Stop tokens that are held back, and tokens that are forced and banned, by whole engines."""

from __future__ import annotations

import pytest

from engine.events import Add
from engine.pace import Pace
from engine.types import COLOCATED, FinishReason, Role, SequenceRequest, TokenDelta
from tests.engine.helpers import (
    Ahead,
    OneByOne,
    deltas_of,
    hand_over,
    make_engine,
    request,
    run,
    untimed,
)
from tests.engine.helpers import expected as by_the_fake
from tests.engine.test_jax_runner import VOCAB, alone, prompt_of, shared_runner, tokens_of
from tests.engine.tiny import tiny_engine

LEAST = 6
STOPS = frozenset(range(0, VOCAB, 2))


def asked(roles: Role = COLOCATED, output: tuple[int, ...] = (), **more: object) -> SequenceRequest:
    settings = {"temperature": 0.8, "seed": 4, "max_tokens": 20, "min_tokens": LEAST}
    settings |= {"stop_token_ids": STOPS, "logit_bias": ((3, 2.0), (5, -100.0))} | more
    return request(f"r {roles}", prompt_of(9), roles, b"r", output, **settings)


def answered(wanted: SequenceRequest, pace: Pace | None = None) -> list[TokenDelta]:
    engine = tiny_engine(shared_runner(), pace=pace)
    engine.submit(Add(wanted))
    return deltas_of(run(engine), wanted.id.attempt.request_id)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_stop_token_comes_after_the_least(seed: int) -> None:
    """Half of the vocabulary stops: it is drawn as soon as it may be."""
    deltas = answered(asked(seed=seed))
    *others, last = tokens_of(deltas)
    assert len(others) >= LEAST
    assert not STOPS & {*others}
    assert last in STOPS
    assert deltas[-1].finish is FinishReason.STOP
    plain = tokens_of(answered(asked(seed=seed, min_tokens=0)))
    assert len(plain) <= LEAST or not STOPS & {*plain[:LEAST]}


def test_looking_ahead_changes_nothing() -> None:
    assert untimed(answered(asked(), Ahead())) == untimed(answered(asked(), OneByOne()))


@pytest.mark.parametrize("done", [1, 4, LEAST])
def test_another_worker_goes_on_as_it_would_have(done: int) -> None:
    whole = tokens_of(answered(asked()))
    assert len(whole) > done
    rest = tokens_of(answered(asked(output=whole[:done])))
    assert rest == whole[done:]


def test_a_handoff_changes_nothing() -> None:
    prefill = tiny_engine(shared_runner(Role.PREFILL, 8))
    decode = tiny_engine(shared_runner(Role.DECODE, 32))
    assert tokens_of(hand_over(prefill, decode, asked, 5)) == tokens_of(answered(asked()))


def test_greedy_tokens_are_forced_and_banned() -> None:
    usual = tokens_of(alone(9, "greedy"))
    forced = asked(temperature=0.0, logit_bias=((usual[0] ^ 1, 100.0),), min_tokens=0, max_tokens=3)
    assert set(tokens_of(answered(forced))) == {usual[0] ^ 1}
    banned = tuple((token, -100.0) for token in sorted({*usual}))
    least = {"stop_token_ids": frozenset(), "min_tokens": 0}
    other = tokens_of(answered(asked(temperature=0.0, logit_bias=banned, **least)))
    assert not {*usual} & {*other}


def test_a_slot_forgets_the_biases_of_the_sequence_before() -> None:
    engine = tiny_engine(shared_runner(), max_seqs=1)
    plain = request("plain", prompt_of(9), temperature=0.0, max_tokens=10)
    engine.submit(Add(asked()))
    engine.submit(Add(plain))
    assert tokens_of(deltas_of(run(engine), "plain")) == tokens_of(alone(9, "greedy"))


def test_the_fake_model_does_not_stop_before_the_least() -> None:
    prompt = (5, 3)
    tokens = by_the_fake(prompt, 6)
    engine = make_engine()
    stops = frozenset(tokens)
    engine.submit(Add(request("r", prompt, max_tokens=9, min_tokens=4, stop_token_ids=stops)))
    deltas = deltas_of(run(engine), "r")
    assert tokens_of(deltas) == tokens[:5]
    assert deltas[-1].finish is FinishReason.STOP


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    engine = tiny_engine(shared_runner())
    engine.submit(Add(asked(logit_bias=((VOCAB, 1.0),))))
    (failure,) = run(engine)
    assert "logit_bias" in failure.message
