"""A prompt's log-probabilities on the wire: in pieces of bounded size, and checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types import AttemptId, PromptLogprobs, SequenceId, TokenDelta
from protos import outbox as module
from protos import worker_pb2 as wire
from protos.codec import decode_step
from protos.errors import WireError
from protos.logprob_codec import decode_prompt_logprobs, encode_prompt_logprobs
from protos.outbox import Outbox, OutboxFull

ID = SequenceId(AttemptId("a", 3), 2)


def scores(count: int, best: int = 2, start: int = 1) -> PromptLogprobs:
    own = -np.arange(start, start + count, dtype=np.float32) / 8
    ids = np.arange(count * best, dtype=np.int32).reshape(count, best)
    return PromptLogprobs(ID, start, own, ids, -ids.astype(np.float32))


def parts(some: PromptLogprobs) -> tuple[object, ...]:
    arrays = some.logprobs, some.top_ids, some.top_logprobs
    return some.id, some.start, *((a.shape, a.dtype, a.tobytes()) for a in arrays)


@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 2**32 - 1))
def test_they_come_back(count: int, best: int, start: int) -> None:
    sent = scores(count, best, start)
    message = encode_prompt_logprobs(sent).SerializeToString()
    found = decode_prompt_logprobs(wire.PromptLogprobs.FromString(message))
    assert parts(found) == parts(sent)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": b""},
        {"logprobs": b"12345"},
        {"top_ids": b"1234"},
        {"top_logprobs": b"1" * 12},
        {"top_ids": b"1" * 12, "top_logprobs": b"1" * 12},
        {"top_ids": b"1" * 168, "top_logprobs": b"1" * 168},
        {"start": 0},
        {"request_id": ""},
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, object]) -> None:
    message = encode_prompt_logprobs(scores(2))
    decode_prompt_logprobs(message)
    for name, value in fields.items():
        setattr(message, name, value)
    with pytest.raises(WireError):
        decode_prompt_logprobs(message)


async def test_a_long_prompt_takes_several_messages_and_holds_up_no_tokens() -> None:
    outbox = Outbox()
    count = module.PROMPT_TOKENS_PER_PIECE * module.PIECES_PER_STEP + 5
    delta = TokenDelta(ID, 0, (7,))
    outbox.add_prompt_logprobs(scores(count))
    outbox.add_delta(delta)
    first = decode_step(await outbox.take(10), {})
    assert first.deltas == (delta,)
    assert not outbox.empty
    second = decode_step(await outbox.take(10), {})
    assert outbox.empty
    assert (await outbox.take(0.0)).ByteSize() == 0
    pieces = [*first.prompt_logprobs, *second.prompt_logprobs]
    assert [p.start for p in pieces] == [1, *(p.stop for p in pieces)][:-1]
    assert pieces[-1].stop == count + 1
    joined = np.concatenate([p.logprobs for p in pieces])
    assert joined.tobytes() == scores(count).logprobs.tobytes()


async def test_what_is_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNSENT_TOKENS", 10)
    outbox = Outbox()
    outbox.add_prompt_logprobs(scores(8))
    with pytest.raises(OutboxFull, match="11 tokens"):
        outbox.add_prompt_logprobs(scores(3, start=9))
    await outbox.take(10)
    outbox.add_prompt_logprobs(scores(10))
