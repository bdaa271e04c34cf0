from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]

class FailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_INTERNAL: _ClassVar[FailureCode]
    FAILURE_INVALID: _ClassVar[FailureCode]
    FAILURE_TRANSFER: _ClassVar[FailureCode]
    FAILURE_PREEMPTED: _ClassVar[FailureCode]
FINISH_NONE: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
FAILURE_INTERNAL: FailureCode
FAILURE_INVALID: FailureCode
FAILURE_TRANSFER: FailureCode
FAILURE_PREEMPTED: FailureCode

class Down(_message.Message):
    __slots__ = ("hello", "start", "abort", "drain", "resync")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    start: Start
    abort: Abort
    drain: Drain
    resync: Resync
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "router_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    router_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., router_id: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("request_id", "attempt", "roles", "prompt", "choices", "sampling", "transfer_id", "sources", "priority", "group")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    roles: int
    prompt: bytes
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    sampling: Sampling
    transfer_id: bytes
    sources: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    group: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., roles: _Optional[int] = ..., prompt: _Optional[bytes] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., transfer_id: _Optional[bytes] = ..., sources: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., group: _Optional[bytes] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("choice", "output")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    choice: int
    output: bytes
    def __init__(self, choice: _Optional[int] = ..., output: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "max_tokens", "stop_token_ids", "top_logprobs", "min_tokens", "bias_ids", "bias_values", "prompt_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    min_tokens: int
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Resync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Up(_message.Message):
    __slots__ = ("welcome", "cache_snapshot", "step")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    cache_snapshot: CacheSnapshot
    step: Step
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., cache_snapshot: _Optional[_Union[CacheSnapshot, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "epoch", "roles", "limits", "sources", "spare_roles", "siblings")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    SPARE_ROLES_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: int
    roles: int
    limits: ModelLimits
    sources: _containers.RepeatedScalarFieldContainer[str]
    spare_roles: int
    siblings: bool
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[int] = ..., roles: _Optional[int] = ..., limits: _Optional[_Union[ModelLimits, _Mapping]] = ..., sources: _Optional[_Iterable[str]] = ..., spare_roles: _Optional[int] = ..., siblings: _Optional[bool] = ...) -> None: ...

class ModelLimits(_message.Message):
    __slots__ = ("fingerprint", "vocab_size", "max_model_len", "block_size", "num_blocks", "max_seqs", "eos_token_ids")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_seqs: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_seqs: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("hashes", "last")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[int]
    last: bool
    def __init__(self, hashes: _Optional[_Iterable[int]] = ..., last: _Optional[bool] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("tokens", "failed", "rejected", "load", "block_events", "prompt_logprobs", "singles")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SINGLES_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Tokens]
    failed: _containers.RepeatedCompositeFieldContainer[Failed]
    rejected: _containers.RepeatedCompositeFieldContainer[Rejected]
    load: Load
    block_events: BlockEvents
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    singles: Singles
    def __init__(self, tokens: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[Failed, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[Rejected, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., block_events: _Optional[_Union[BlockEvents, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., singles: _Optional[_Union[Singles, _Mapping]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("request_id", "attempt", "choice", "index", "tokens", "finish", "logprobs", "cached_tokens", "prefill_s", "number")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish: Finish
    logprobs: _containers.RepeatedCompositeFieldContainer[Logprobs]
    cached_tokens: int
    prefill_s: float
    number: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[Finish, str]] = ..., logprobs: _Optional[_Iterable[_Union[Logprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., prefill_s: _Optional[float] = ..., number: _Optional[int] = ...) -> None: ...

class Singles(_message.Message):
    __slots__ = ("numbers", "indexes", "tokens")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("request_id", "attempt", "choice", "start", "logprobs", "top_ids", "top_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    start: int
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., start: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "attempt", "code", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    code: FailureCode
    message: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., code: _Optional[_Union[FailureCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("request_id", "attempt", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("waiting", "running", "waiting_tokens", "free_blocks", "cached_blocks", "running_blocks", "exported_blocks", "step_age_s", "draining", "compiles", "export_limited", "transfers", "prefix_queries", "prefix_hits", "dropped")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    COMPILES_FIELD_NUMBER: _ClassVar[int]
    EXPORT_LIMITED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    waiting_tokens: int
    free_blocks: int
    cached_blocks: int
    running_blocks: int
    exported_blocks: int
    step_age_s: float
    draining: bool
    compiles: int
    export_limited: bool
    transfers: _containers.RepeatedCompositeFieldContainer[TransferCounts]
    prefix_queries: int
    prefix_hits: int
    dropped: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., running_blocks: _Optional[int] = ..., exported_blocks: _Optional[int] = ..., step_age_s: _Optional[float] = ..., draining: _Optional[bool] = ..., compiles: _Optional[int] = ..., export_limited: _Optional[bool] = ..., transfers: _Optional[_Iterable[_Union[TransferCounts, _Mapping]]] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...

class TransferCounts(_message.Message):
    __slots__ = ("transport", "roles", "transfers", "chunks", "bytes", "seconds", "skipped_tokens", "overlap_bytes", "overlap_seconds", "fallbacks", "waiting", "reads", "failures")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    transport: str
    roles: int
    transfers: int
    chunks: int
    bytes: int
    seconds: float
    skipped_tokens: int
    overlap_bytes: int
    overlap_seconds: float
    fallbacks: int
    waiting: int
    reads: int
    failures: _containers.ScalarMap[str, int]
    def __init__(self, transport: _Optional[str] = ..., roles: _Optional[int] = ..., transfers: _Optional[int] = ..., chunks: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., skipped_tokens: _Optional[int] = ..., overlap_bytes: _Optional[int] = ..., overlap_seconds: _Optional[float] = ..., fallbacks: _Optional[int] = ..., waiting: _Optional[int] = ..., reads: _Optional[int] = ..., failures: _Optional[_Mapping[str, int]] = ...) -> None: ...

class BlockEvents(_message.Message):
    __slots__ = ("added", "evicted")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    added: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, added: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[int]] = ...) -> None: ...
