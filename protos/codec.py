"""Plain values ↔ wire messages. What comes from the wire is checked here, once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from engine.types import (
    COLOCATED,
    AttemptId,
    Failure,
    FailureCode,
    FinishReason,
    Load,
    ModelLimits,
    PromptLogprobs,
    Role,
    SequenceId,
    SequenceRequest,
    TokenDelta,
    TokenLogprobs,
)
from protos import worker_pb2 as wire
from protos.attempt_codec import decode_attempt
from protos.block_codec import NO_CHANGES, BlockChanges, decode_changes
from protos.errors import WireError
from protos.logprob_codec import decode_prompt_logprobs
from protos.sampling_codec import decode_sampling, encode_sampling
from protos.singles_codec import Names, decode_singles, note_name
from protos.token_codec import pack_prompt, pack_tokens, unpack_tokens
from protos.transfer_codec import Transfers, decode_transfers, encode_transfers

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 64 * 2**20
MESSAGE_LIMITS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
TRANSFER_ID_BYTES = 16
GROUP_BYTES = 16
MAX_CHOICES = 128
"""OpenAI's limit for `n`."""

NO_ROLES = Role(0)

_FINISH = {None: wire.FINISH_NONE, FinishReason.STOP: wire.FINISH_STOP,
           FinishReason.LENGTH: wire.FINISH_LENGTH}  # fmt: skip
_FINISH_BACK = {number: reason for reason, number in _FINISH.items()}
_FAILURE = {
    FailureCode.INTERNAL: wire.FAILURE_INTERNAL,
    FailureCode.INVALID: wire.FAILURE_INVALID,
    FailureCode.TRANSFER: wire.FAILURE_TRANSFER,
    FailureCode.PREEMPTED: wire.FAILURE_PREEMPTED,
}
_FAILURE_BACK = {number: code for code, number in _FAILURE.items()}


@dataclass(frozen=True, slots=True)
class StartOrder:
    """A decoded Start: the sequences of one attempt, and where their KV is served."""

    attempt: AttemptId
    sequences: tuple[SequenceRequest, ...]
    sources: tuple[str, ...]

    @property
    def roles(self) -> Role:
        return self.sequences[0].roles

    @property
    def transfer_id(self) -> bytes:
        return self.sequences[0].transfer_id


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A decoded Welcome: what a worker is. `epoch` is new for every worker process.

    `spare_roles` are those it takes when no worker that is meant for them is left, or when there
    is so little to do that it is done sooner here. `siblings`: the choices of a prompt share KV.
    """

    epoch: int
    roles: Role
    limits: ModelLimits
    sources: tuple[str, ...]
    spare_roles: Role = NO_ROLES
    siblings: bool = True


@dataclass(frozen=True, slots=True)
class RejectedAttempt:
    """The worker did not take it; another may."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """A decoded Step. `load` is None when the message carries none.

    `transfers` is empty when they are what the worker told last. `dropped` counts messages of
    routers that it had no use for, since its epoch began.
    """

    deltas: tuple[TokenDelta, ...]
    failures: tuple[Failure, ...]
    rejected: tuple[RejectedAttempt, ...]
    load: Load | None
    draining: bool
    transfers: Transfers
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    dropped: int = 0
    blocks: BlockChanges = NO_CHANGES


# ---- messages ----


def parse_down(data: bytes) -> wire.Down:
    """A router's message. Raises WireError for bytes that are none."""
    try:
        return wire.Down.FromString(data)
    except DecodeError as error:
        raise WireError(f"{len(data)} bytes are no message: {error}") from None


def parse_up(data: bytes) -> wire.Up:
    """A worker's message. Raises WireError for bytes that are none."""
    try:
        return wire.Up.FromString(data)
    except DecodeError as error:
        raise WireError(f"{len(data)} bytes are no message: {error}") from None


# ---- Start ----


def encode_start(order: StartOrder) -> wire.Start:
    """A Start message; all sequences of an order share all but choice and output."""
    first = order.sequences[0]
    return wire.Start(
        request_id=order.attempt.request_id,
        attempt=order.attempt.attempt,
        roles=first.roles.value,
        prompt=pack_prompt(first.prompt),
        choices=[
            wire.Choice(choice=s.id.choice, output=pack_tokens(s.output)) for s in order.sequences
        ],
        sampling=encode_sampling(first.sampling),
        transfer_id=first.transfer_id,
        sources=order.sources,
        priority=first.priority,
        group=first.group,
    )


def decode_start(message: wire.Start) -> StartOrder:
    """The inverse of `encode_start`.

    Raises:
        WireError: a field is missing or out of range; names it.
    """
    attempt = decode_attempt(message.request_id, message.attempt)
    if not 0 < message.roles <= COLOCATED.value:
        raise WireError(f"roles={message.roles} are no roles")
    roles = Role(message.roles)
    wanted = 0 if roles == COLOCATED else TRANSFER_ID_BYTES
    if len(message.transfer_id) != wanted:
        raise WireError(f"a transfer_id of {len(message.transfer_id)} bytes, {wanted} are wanted")
    if len(message.group) not in (0, GROUP_BYTES):
        raise WireError(f"a group of {len(message.group)} bytes, 0 or {GROUP_BYTES} are wanted")
    if not message.choices:
        raise WireError("no choices")
    prompt, sampling = unpack_tokens(message.prompt), decode_sampling(message.sampling)
    if not prompt:
        raise WireError("an empty prompt")
    numbers = [choice.choice for choice in message.choices]
    if max(numbers) >= MAX_CHOICES:
        raise WireError(f"choice {max(numbers)} is not below {MAX_CHOICES}")
    if len(set(numbers)) != len(numbers):
        raise WireError(f"choices {numbers} repeat")
    sequences = tuple(
        SequenceRequest(
            SequenceId(attempt, choice.choice),
            roles,
            prompt,
            sampling,
            unpack_tokens(choice.output),
            message.transfer_id,
            message.priority,
            message.group,
        )
        for choice in message.choices
    )
    return StartOrder(attempt, sequences, tuple(message.sources))


# ---- Welcome ----


def encode_welcome(info: WorkerInfo) -> wire.Welcome:
    limits = info.limits
    return wire.Welcome(
        protocol_version=PROTOCOL_VERSION,
        epoch=info.epoch,
        roles=info.roles.value,
        limits=wire.ModelLimits(
            fingerprint=limits.fingerprint,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_seqs=limits.max_seqs,
            eos_token_ids=sorted(limits.eos_token_ids),
        ),
        sources=info.sources,
        spare_roles=info.spare_roles.value,
        siblings=info.siblings,
    )


def decode_welcome(message: wire.Welcome) -> WorkerInfo:
    """Raises WireError for another protocol version or roles that are none."""
    if message.protocol_version != PROTOCOL_VERSION:
        raise WireError(
            f"the worker speaks protocol {message.protocol_version}, this router {PROTOCOL_VERSION}"
        )
    if not 0 < message.roles <= COLOCATED.value:
        raise WireError(f"roles={message.roles} are no roles")
    if message.spare_roles > COLOCATED.value:
        raise WireError(f"spare_roles={message.spare_roles} are no roles")
    limits = message.limits
    return WorkerInfo(
        message.epoch,
        Role(message.roles),
        ModelLimits(
            limits.fingerprint,
            limits.vocab_size,
            limits.max_model_len,
            limits.block_size,
            limits.num_blocks,
            limits.max_seqs,
            frozenset(limits.eos_token_ids),
        ),
        tuple(message.sources),
        Role(message.spare_roles),
        message.siblings,
    )


# ---- Step ----


def encode_delta(delta: TokenDelta, number: int = 0) -> wire.Tokens:
    """`number`: by which the sequence may be named from now on; see protos.singles_codec."""
    attempt, choice = delta.id
    return wire.Tokens(
        request_id=attempt.request_id,
        attempt=attempt.attempt,
        choice=choice,
        index=delta.index,
        tokens=delta.tokens,
        finish=_FINISH[delta.finish],
        logprobs=[
            wire.Logprobs(logprob=p.logprob, top_ids=p.top_ids, top_logprobs=p.top_logprobs)
            for p in delta.logprobs or ()
        ],
        cached_tokens=delta.cached_tokens,
        prefill_s=delta.prefill_s,
        number=number,
    )


def decode_delta(message: wire.Tokens) -> TokenDelta:
    """Raises WireError when the log-probabilities do not match the tokens."""
    tokens = tuple(message.tokens)
    logprobs = None
    if message.logprobs:
        if len(message.logprobs) != len(tokens):
            raise WireError(f"{len(message.logprobs)} log-probabilities for {len(tokens)} tokens")
        logprobs = tuple(
            TokenLogprobs(p.logprob, tuple(p.top_ids), tuple(p.top_logprobs))
            for p in message.logprobs
        )
    return TokenDelta(
        _sequence_id(message.request_id, message.attempt, message.choice),
        message.index,
        tokens,
        logprobs,
        _FINISH_BACK.get(message.finish),
        message.cached_tokens,
        prefill_s=message.prefill_s,
    )


@functools.lru_cache(maxsize=8192)
def _sequence_id(request_id: str, attempt: int, choice: int) -> SequenceId:
    """Found again for every further token of a sequence."""
    return SequenceId(decode_attempt(request_id, attempt), choice)


def encode_failure(failure: Failure) -> wire.Failed:
    return wire.Failed(
        request_id=failure.attempt.request_id,
        attempt=failure.attempt.attempt,
        code=_FAILURE[failure.code],
        message=failure.message,
    )


def encode_rejected(attempt: AttemptId, reason: str) -> wire.Rejected:
    return wire.Rejected(request_id=attempt.request_id, attempt=attempt.attempt, reason=reason)


def encode_load(load: Load, *, draining: bool, transfers: Transfers, dropped: int = 0) -> wire.Load:
    return wire.Load(
        waiting=load.waiting,
        running=load.running,
        waiting_tokens=load.waiting_tokens,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        running_blocks=load.running_blocks,
        exported_blocks=load.exported_blocks,
        step_age_s=load.step_age_s,
        compiles=load.compiles,
        export_limited=load.export_limited,
        prefix_queries=load.prefix_queries,
        prefix_hits=load.prefix_hits,
        draining=draining,
        dropped=dropped,
        transfers=encode_transfers(transfers),
    )


def decode_step(message: wire.Step, names: Names) -> StepUpdate:
    """`names` are the session's so far, empty at first; it learns of those that are told.

    Raises:
        WireError: an item is malformed.
    """
    named: list[TokenDelta] = []
    for tokens in message.tokens:
        delta = decode_delta(tokens)
        note_name(names, tokens.number, delta.id)
        named.append(delta)
    load = None
    if message.HasField("load"):
        m = message.load
        load = Load(
            m.waiting, m.running, m.waiting_tokens, m.free_blocks, m.cached_blocks,
            m.running_blocks, m.exported_blocks, m.step_age_s, m.compiles, m.export_limited,
            m.prefix_queries, m.prefix_hits,
        )  # fmt: skip
    return StepUpdate(
        (*named, *decode_singles(message.singles, names)),
        tuple(
            Failure(
                decode_attempt(f.request_id, f.attempt),
                _FAILURE_BACK.get(f.code, FailureCode.INTERNAL),
                f.message,
            )
            for f in message.failed
        ),
        tuple(
            RejectedAttempt(decode_attempt(r.request_id, r.attempt), r.reason)
            for r in message.rejected
        ),
        load,
        message.load.draining,
        decode_transfers(message.load.transfers),
        tuple(decode_prompt_logprobs(p) for p in message.prompt_logprobs),
        message.load.dropped,
        decode_changes(message.block_events),
    )
