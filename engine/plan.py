"""The step plan: everything one engine step does to the devices, as plain values.

The leader of a multi-host worker can send a plan to its followers, which replay it.
Entries run in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.types import (
    KVArrays,
    PromptLogprobs,
    SamplingParams,
    SequenceId,
    TokenLogprobs,
)

LAST_SAMPLED = -1
"""In a row's tokens: the token that was last sampled for the row's slot, whatever it is."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to sample the next token of one row.

    `position` is the position of the token to be sampled, counted from the first prompt
    token; the noise is keyed by (seed, choice, position). `biases`: how many of the slot's
    apply, from the first on.
    """

    params: SamplingParams
    choice: int
    position: int
    biases: int = 0


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence's share of a batch.

    Attributes:
        tokens: tokens to compute, at positions [start, stop); LAST_SAMPLED stands for one
            that the host has not read back yet.
        blocks: block table, int32; covers at least `stop` tokens, and does not change.
        windowed_blocks: the same of the windowed layers where they have blocks of their own; see
            engine.layer_groups.
        slot: row of the state that a sequence has on the devices: its penalty counts, its
            biases and the token last sampled.
        sampling: None when no token is to be sampled (more of the prompt is to come).
        targets: prompt tokens at positions [start + 1, ...) whose log-probabilities are wanted,
            and `top_targets` alternatives of each; none beyond `stop`.
    """

    id: SequenceId
    tokens: tuple[int, ...]
    start: int
    blocks: np.ndarray
    slot: int
    sampling: RowSampling | None
    targets: tuple[int, ...] = ()
    top_targets: int = 0
    windowed_blocks: np.ndarray | None = None

    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        """The block tables, one per layer group."""
        more = self.windowed_blocks
        return (self.blocks,) if more is None else (self.blocks, more)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class RunBatch:
    """One ragged forward pass. Rows of one token come first, then the longer ones."""

    rows: tuple[BatchRow, ...]


@dataclass(frozen=True, slots=True)
class LoadTokenCounts:
    """Rebuild the penalty counts of `slot` from a sequence's tokens."""

    slot: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadBiases:
    """Set the biases of `slot`: `values[i]` is added to the logit of token `ids[i]`."""

    slot: int
    ids: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExportKV:
    """Copy KV of tokens [start, stop) out of the pool, into a buffer of its own.

    `slots[i]` is the place (block * block_size + offset) of token start + i, `windowed_slots[i]`
    that of the windowed layers' where they have blocks of their own. Only the layers that see the
    whole context are copied unless `windowed`. The copy is a numpy array, or stays where the pool
    is if `on_device`.
    """

    read_id: int
    start: int
    stop: int
    slots: np.ndarray  # int32 [stop - start]
    on_device: bool = False
    windowed: bool = True
    windowed_slots: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class ImportKV:
    """Copy KV of tokens [start, start + n) into the pool; slots and layers as of an ExportKV.

    Numpy `arrays` are read before the step that holds this entry returns, not after. Those on
    devices are this process's, and may be on others than the pool's.
    """

    import_id: int
    start: int
    slots: np.ndarray  # int32 [n]
    arrays: KVArrays
    windowed: bool = True
    windowed_slots: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy whole KV blocks within the pool: sources[i] to targets[i], in every layer.

    To be used only where all layers have one pool.

    No block is both a source and a target.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]


Entry = RunBatch | LoadTokenCounts | LoadBiases | ExportKV | ImportKV | CopyBlocks


@dataclass(frozen=True, slots=True)
class StepPlan:
    entries: tuple[Entry, ...] = ()


@dataclass(slots=True)
class StepOutcome:
    """What the devices answered.

    Attributes:
        tokens: the sampled token of each row of the batch that samples one.
        logprobs: the same, for rows that asked for them.
        prompt_logprobs: of each row with targets.
        exported: read_id → what an ExportKV gave; each array owns its memory.
    """

    tokens: dict[SequenceId, int] = field(default_factory=dict)
    logprobs: dict[SequenceId, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[SequenceId, PromptLogprobs] = field(default_factory=dict)
    exported: dict[int, KVArrays] = field(default_factory=dict)
