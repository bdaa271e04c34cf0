"""What one engine step tells the world, and what the world may ask of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.types import (
    AttemptId,
    Failure,
    KVArrays,
    Load,
    PromptLogprobs,
    SequenceId,
    SequenceRequest,
    TokenDelta,
)

# ---- asked of the engine ----


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a sequence."""

    request: SequenceRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget an attempt, whatever its state; unknown ones are ignored."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class ReadKV:
    """Read tokens [start, stop) of an exporting sequence; answered by KVRead.

    As numpy arrays, or as arrays that stay on the devices if `on_device`. Without `windowed` those
    of layers that see the whole context alone: others have given back what no later token sees.
    """

    read_id: int
    transfer_id: bytes
    start: int
    stop: int
    on_device: bool = False
    windowed: bool = True


@dataclass(frozen=True, slots=True)
class ReleaseExport:
    """The transfer has ended: its blocks fall back. Unknown ones are ignored."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class WriteKV:
    """Write KV of tokens [start, stop) of an importing sequence, none of them reused.

    `arrays` must stay readable until KVWritten answers. Layers as of a ReadKV.
    """

    import_id: int
    id: SequenceId
    start: int
    stop: int
    arrays: KVArrays
    windowed: bool = True


@dataclass(frozen=True, slots=True)
class BeginDecode:
    """All KV has been written; `first_token` is the one that prefill sampled."""

    id: SequenceId
    first_token: int


Command = Add | Abort | ReadKV | ReleaseExport | WriteKV | BeginDecode

# ---- told by the engine ----


@dataclass(frozen=True, slots=True)
class Admitted:
    """Slot and blocks are reserved for `tokens` tokens of KV.

    Those of tokens [0, reused) are there already; the others will be computed or imported.
    """

    id: SequenceId
    transfer_id: bytes
    tokens: int
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Rejected:
    """Not taken: the queue is full."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class Computed:
    """KV of tokens [0, tokens) of an exporting sequence can be read."""

    transfer_id: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill has ended with `first`; nothing more will be computed for the transfer."""

    transfer_id: bytes
    first: TokenDelta


@dataclass(frozen=True, slots=True)
class KVRead:
    """`arrays` is None when the transfer was gone before it could be read."""

    read_id: int
    arrays: KVArrays | None


@dataclass(frozen=True, slots=True)
class KVWritten:
    """The arrays of a WriteKV are no longer needed; `ok` is False if the sequence was gone."""

    import_id: int
    ok: bool


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """Full blocks whose KV has become reusable here, and those that have been evicted.

    By the chain hashes of engine.block_hash. Taken in order from an empty set, `evicted` before
    `added`, these events give what is cached: none is added twice or evicted unless it is there.
    """

    added: tuple[int, ...]
    evicted: tuple[int, ...]


Event = (
    Admitted
    | Rejected
    | Computed
    | Prefilled
    | KVRead
    | KVWritten
    | CacheChanged
    | PromptLogprobs
    | TokenDelta
    | Failure
)


@dataclass(frozen=True, slots=True)
class StepResult:
    events: tuple[Event, ...]
    load: Load
