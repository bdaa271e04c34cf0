"""Whatever is encoded comes back, and what no peer of this version sends is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types import (
    COLOCATED,
    AttemptId,
    Failure,
    FailureCode,
    FinishReason,
    Load,
    ModelLimits,
    Role,
    SamplingParams,
    SequenceId,
    SequenceRequest,
    TokenDelta,
    TokenLogprobs,
)
from kvtransfer.books import CAUSES, COUNTED, TransferCounts
from protos import codec
from protos import worker_pb2 as wire
from protos.block_codec import BlockChanges, SnapshotReader, encode_changes, encode_piece
from protos.codec import RejectedAttempt, StartOrder, WireError, WorkerInfo
from protos.token_codec import pack_tokens, unpack_tokens
from protos.transfer_codec import Transfers

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
ids = st.builds(AttemptId, st.text(min_size=1, max_size=40), U32)
hashes = st.lists(U64, max_size=9).map(tuple)
token_lists = st.lists(U32, max_size=20).map(tuple)
some_tokens = st.lists(U32, min_size=1, max_size=20).map(tuple)


def f32(low: float, high: float, *, open_low: bool = False) -> st.SearchStrategy[float]:
    low32, high32 = float(np.float32(low)), float(np.float32(high))
    return st.floats(low32, high32, width=32, exclude_min=open_low)


token_ids = st.integers(0, 2**31 - 1)
samplings = st.builds(
    SamplingParams,
    temperature=f32(0, 1e6),
    top_k=st.integers(0, 2**31 - 1),
    top_p=f32(0, 1, open_low=True),
    min_p=f32(0, 1),
    presence_penalty=f32(-2, 2),
    frequency_penalty=f32(-2, 2),
    repetition_penalty=f32(0, 100, open_low=True),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 2**32 - 1),
    stop_token_ids=st.frozensets(token_ids, max_size=5),
    min_tokens=st.just(0) | st.just(1),
    logit_bias=st.dictionaries(token_ids, f32(-100, 100), max_size=3).map(lambda d: (*d.items(),)),
    top_logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)


@st.composite
def orders(draw: st.DrawFn) -> StartOrder:
    attempt, roles = draw(ids), draw(st.sampled_from([Role.PREFILL, Role.DECODE, COLOCATED]))
    prompt, sampling = draw(some_tokens), draw(samplings)
    transfer_id = b"" if roles == COLOCATED else draw(st.binary(min_size=16, max_size=16))
    priority = draw(st.integers(-(2**31), 2**31 - 1))
    sequences = tuple(
        SequenceRequest(
            SequenceId(attempt, choice),
            roles,
            prompt,
            sampling,
            draw(token_lists),
            transfer_id,
            priority,
        )
        for choice in draw(st.lists(st.integers(0, 100), min_size=1, max_size=4, unique=True))
    )
    return StartOrder(attempt, sequences, tuple(draw(st.lists(st.text(max_size=20), max_size=3))))


@st.composite
def deltas(draw: st.DrawFn) -> TokenDelta:
    tokens = draw(some_tokens)
    tops = st.integers(0, 3).flatmap(
        lambda n: st.tuples(
            st.lists(U32, min_size=n, max_size=n).map(tuple),
            st.lists(f32(-1e3, 0), min_size=n, max_size=n).map(tuple),
        )
    )
    one = st.builds(lambda own, top: TokenLogprobs(own, *top), f32(-1e3, 0), tops)
    count = len(tokens)
    logprobs = draw(st.none() | st.lists(one, min_size=count, max_size=count).map(tuple))
    finish = draw(st.none() | st.sampled_from(FinishReason))
    return TokenDelta(
        SequenceId(draw(ids), draw(U32)),
        draw(U32),
        tokens,
        logprobs,
        finish,
        prefill_s=draw(st.sampled_from((0.0, 1.5))),
    )


transfers = st.dictionaries(
    st.tuples(st.sampled_from([Role.PREFILL, Role.DECODE]), st.sampled_from(COUNTED)),
    st.builds(
        TransferCounts,
        U64, U64, U64, st.floats(0, 1e9), U64, U64, st.floats(0, 1e9), U64, U32, U32,
        st.dictionaries(st.sampled_from(sorted(CAUSES)), U64, max_size=4),
    ),
    max_size=4,
)  # fmt: skip


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@given(orders())
def test_an_order_comes_back(order: StartOrder) -> None:
    assert codec.decode_start(over_the_wire(codec.encode_start(order))) == order


@given(deltas())
def test_a_delta_comes_back(delta: TokenDelta) -> None:
    assert codec.decode_delta(over_the_wire(codec.encode_delta(delta))) == delta


@given(token_lists)
def test_tokens_come_back(tokens: tuple[int, ...]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens
    assert pack_tokens(tokens) == b"".join(t.to_bytes(4, "little") for t in tokens)


@given(
    st.builds(
        WorkerInfo,
        st.integers(0, 2**64 - 1),
        st.sampled_from([Role.PREFILL, Role.DECODE, COLOCATED]),
        st.builds(ModelLimits, st.text(max_size=9), U32, U32, U32, U32, U32, st.frozensets(U32)),
        st.lists(st.text(max_size=20), max_size=3).map(tuple),
        st.sampled_from([Role(0), Role.PREFILL]),
    )
)
def test_a_welcome_comes_back(info: WorkerInfo) -> None:
    assert codec.decode_welcome(over_the_wire(codec.encode_welcome(info))) == info


@given(
    st.lists(deltas(), max_size=3),
    st.lists(st.builds(Failure, ids, st.sampled_from(FailureCode), st.text(max_size=20))),
    st.lists(st.builds(RejectedAttempt, ids, st.text(max_size=20))),
    st.builds(Load, U32, U32, st.integers(0, 2**64 - 1), U32, U32, U32, U32, f32(0, 1e6), U32,
             st.booleans()),
    st.booleans(),
    transfers,
    st.builds(BlockChanges, hashes, hashes),
)  # fmt: skip
def test_a_step_comes_back(
    tokens: list[TokenDelta],
    failures: list[Failure],
    rejected: list[RejectedAttempt],
    load: Load,
    draining: bool,
    transfers: Transfers,
    blocks: BlockChanges,
) -> None:
    step = wire.Step(
        tokens=[codec.encode_delta(d) for d in tokens],
        failed=[codec.encode_failure(f) for f in failures],
        rejected=[codec.encode_rejected(r.attempt, r.reason) for r in rejected],
        load=codec.encode_load(load, draining=draining, transfers=transfers),
        block_events=encode_changes(blocks),
    )
    update = codec.decode_step(over_the_wire(step), {})
    assert update.deltas == tuple(tokens)
    assert update.failures == tuple(failures)
    assert update.rejected == tuple(rejected)
    assert (update.load, update.draining) == (load, draining)
    assert update.transfers == transfers
    assert update.blocks == blocks


@given(st.lists(hashes, min_size=1))
def test_a_snapshot_comes_back(pieces: list[tuple[int, ...]]) -> None:
    reader = SnapshotReader(most=sum(map(len, pieces)))
    for _ in range(2):  # one after another
        *before, last = pieces
        for piece in before:
            assert reader.take(over_the_wire(encode_piece(piece, last=False))) is None
        read = reader.take(over_the_wire(encode_piece(last, last=True)))
        assert read == [each for piece in pieces for each in piece]


def test_a_step_without_a_load_tells_none() -> None:
    update = codec.decode_step(wire.Step(), {})
    assert (update.load, update.transfers) == (None, {})
    assert not update.blocks


def told_transfers(**fields: object) -> wire.Step:
    counts = {"transport": "shm", "roles": Role.PREFILL.value, **fields}
    return wire.Step(load=wire.Load(transfers=[wire.TransferCounts(**counts)]))


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (told_transfers(roles=0), "roles=0"),
        (told_transfers(roles=3), "roles=3"),
        (told_transfers(seconds=math.nan), "nan"),
        (told_transfers(overlap_seconds=-1.0), "-1.0"),
        (told_transfers(seconds=math.inf), "inf"),
    ],
)
def test_wrong_transfer_counts_are_refused(step: wire.Step, named: str) -> None:
    codec.decode_step(told_transfers(), {})
    with pytest.raises(WireError, match=named):
        codec.decode_step(step, {})


def test_what_a_later_version_counts_costs_no_session() -> None:
    assert not codec.decode_step(told_transfers(transport="pigeon"), {}).transfers
    failures = {"bad luck": 2, "failed": 1, "timeout": 3}
    (counts,) = codec.decode_step(told_transfers(failures=failures), {}).transfers.values()
    assert counts.failures == {"failed": 3, "timeout": 3}


def test_transfer_counts_that_repeat_are_refused() -> None:
    step = told_transfers()
    step.load.transfers.add().CopyFrom(step.load.transfers[0])
    with pytest.raises(WireError, match="repeats"):
        codec.decode_step(step, {})


def biased(ids: list[int], values: list[float]) -> Callable[[wire.Start], None]:
    def change(start: wire.Start) -> None:
        start.sampling.bias_ids[:] = ids
        start.sampling.bias_values[:] = values

    return change


def a_start() -> wire.Start:
    attempt = AttemptId("r", 0)
    sequence = SequenceRequest(
        SequenceId(attempt, 0), Role.PREFILL, (1, 2), SamplingParams(), (), b"t" * 16
    )
    return codec.encode_start(StartOrder(attempt, (sequence,), ()))


def sampling(**fields: float) -> Callable[[wire.Start], None]:
    def change(start: wire.Start) -> None:
        for name, value in fields.items():
            setattr(start.sampling, name, value)

    return change


def start(**fields: object) -> Callable[[wire.Start], None]:
    def change(message: wire.Start) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return change


REFUSED = {
    "no id": (start(request_id=""), "request_id of 0"),
    "a long id": (start(request_id="x" * 257), "request_id of 257"),
    "no roles": (start(roles=0), "roles=0"),
    "unknown roles": (start(roles=4), "roles=4"),
    "no transfer id": (start(transfer_id=b""), "transfer_id of 0 bytes"),
    "a short transfer id": (start(transfer_id=b"t" * 15), "transfer_id of 15 bytes"),
    "a transfer id when colocated": (start(roles=3), "0 are wanted"),
    "no prompt": (start(prompt=b""), "empty prompt"),
    "half a token": (start(prompt=b"12345"), "5 bytes"),
    "half an output token": (lambda m: setattr(m.choices[0], "output", b"1"), "1 bytes"),
    "no choices": (lambda m: m.ClearField("choices"), "no choices"),
    "a choice twice": (lambda m: m.choices.add(choice=0), "repeat"),
    "a choice beyond the limit": (lambda m: m.choices.add(choice=128), "128 is not below 128"),
    "temperature below 0": (sampling(temperature=-0.1), "temperature"),
    "temperature without end": (sampling(temperature=math.inf), "temperature"),
    "temperature no number": (sampling(temperature=math.nan), "temperature"),
    "top_k beyond int32": (sampling(top_k=2**31), "top_k"),
    "top_p 0": (sampling(top_p=0.0), "top_p"),
    "top_p above 1": (sampling(top_p=1.1), "top_p"),
    "top_p no number": (sampling(top_p=math.nan), "top_p"),
    "top_p that rounds to 0": (sampling(top_p=1e-50), "top_p"),
    "min_p below 0": (sampling(min_p=-0.1), "min_p"),
    "min_p above 1": (sampling(min_p=1.1), "min_p"),
    "presence no number": (sampling(presence_penalty=math.nan), "penalties"),
    "frequency without end": (sampling(frequency_penalty=-math.inf), "penalties"),
    "repetition 0": (sampling(repetition_penalty=0.0), "repetition_penalty"),
    "repetition without end": (sampling(repetition_penalty=math.inf), "repetition_penalty"),
    "no tokens": (sampling(max_tokens=0), "max_tokens"),
    "too many alternatives": (sampling(top_logprobs=21), "top_logprobs"),
    "less than the least tokens": (sampling(min_tokens=17), "min_tokens"),
    "biases without tokens": (biased([1], [1.0, 2.0]), "2 biases for 1 tokens"),
    "a bias without end": (biased([1], [math.inf]), "logit_bias"),
    "a token biased twice": (biased([1, 1], [1.0, 2.0]), "logit_bias"),
    "too many biases": (biased([*range(301)], [1.0] * 301), "logit_bias"),
    "a bias of no token": (biased([2**31], [1.0]), "logit_bias"),
    "a stop that is no token": (
        lambda m: m.sampling.stop_token_ids.append(2**31),
        "stop_token_ids",
    ),
    "too many alternatives of the prompt": (sampling(prompt_logprobs=21), "prompt_logprobs"),
    "two at once": (sampling(max_tokens=0, top_p=0.0), "top_p, max_tokens"),
}


@pytest.mark.parametrize(("change", "named"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_start_is_refused_by_name(change: Callable[[wire.Start], None], named: str) -> None:
    message = a_start()
    codec.decode_start(message)
    change(message)
    with pytest.raises(WireError, match=named):
        codec.decode_start(message)


def test_an_empty_start_is_refused() -> None:
    with pytest.raises(WireError):
        codec.decode_start(wire.Start())


def test_another_version_is_refused() -> None:
    info = WorkerInfo(1, Role.DECODE, ModelLimits("m", 1, 1, 1, 1, 1), ())
    welcome = codec.encode_welcome(info)
    welcome.protocol_version += 1
    with pytest.raises(WireError, match=f"protocol {codec.PROTOCOL_VERSION + 1}"):
        codec.decode_welcome(welcome)


@pytest.mark.parametrize(("roles", "spare"), [(0, 0), (4, 0), (2, 4)])
def test_a_welcome_with_roles_that_are_none_is_refused(roles: int, spare: int) -> None:
    with pytest.raises(WireError, match="are no roles"):
        codec.decode_welcome(
            wire.Welcome(protocol_version=codec.PROTOCOL_VERSION, roles=roles, spare_roles=spare)
        )


def test_log_probabilities_must_match_the_tokens() -> None:
    message = wire.Tokens(request_id="r", tokens=[1, 2], logprobs=[wire.Logprobs()])
    with pytest.raises(WireError, match="1 log-probabilities for 2 tokens"):
        codec.decode_delta(message)


@pytest.mark.parametrize("item", ["tokens", "failed", "rejected"])
def test_an_item_without_an_id_is_refused(item: str) -> None:
    step = wire.Step()
    getattr(step, item).add()
    with pytest.raises(WireError, match="request_id"):
        codec.decode_step(step, {})
