"""Which sequences a step computes, and where their KV lies. Plain Python, no jax.

A step can be scheduled while the last one is still being computed: all that it needs is known by
then but the tokens that are being sampled, and those stay on the devices (LAST_SAMPLED). A
sequence that turns out to have ended with such a token has one row too many, whose result is
dropped.
"""

from __future__ import annotations

import time

from engine.admission import Admission
from engine.batch_rows import batch_row, take_token
from engine.blocks import BlockPool
from engine.copies import CopyQueue
from engine.events import (
    Admitted,
    BeginDecode,
    Computed,
    Event,
    KVRead,
    KVWritten,
    Prefilled,
    ReadKV,
    Rejected,
    WriteKV,
)
from engine.exports import Exports
from engine.growth import Growth
from engine.layer_groups import all_kept, layer_groups
from engine.limits import Limits
from engine.plan import (
    BatchRow,
    Entry,
    ExportKV,
    ImportKV,
    RunBatch,
    StepOutcome,
    StepPlan,
)
from engine.prefill_order import PrefillQueue
from engine.prefix_cache import PrefixCache
from engine.recount import check_blocks, check_queue
from engine.reuse import Reuse
from engine.sequence import Sequence, SequenceState, no_tables
from engine.slot_loads import slot_loads
from engine.types import (
    AttemptId,
    Failure,
    FailureCode,
    Load,
    Role,
    SequenceId,
    SequenceRequest,
)
from engine.under_way import StepsUnderWay

_Row = tuple[BatchRow, Sequence]

EXPORTS_PER_STEP = 32
IMPORTS_PER_STEP = 8
IMPORTS_PER_BUSY_STEP = 2
"""While sequences decode, a step takes few pieces, so that their tokens are not held up."""


class Scheduler:
    """Owns the sequences and the block pool. Not thread safe: the engine thread's alone."""

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        cache: PrefixCache | None = None,
        reach: int | None = None,
        windowed: BlockPool | None = None,
    ) -> None:
        """A scheduler without sequences; `cache` is of the pool's blocks.

        Args:
            reach: of the layers of the pool `windowed`, or without one of all layers; None: some
                see the whole context, or are to keep the KV of all of it.

        Raises:
            ValueError: decoding sequences could fill every step, and no prompt be computed. Or
                a cache would lack what windowed layers give back.
        """
        if cache is not None and reach is not None:
            raise ValueError("a prefix cache needs the KV that windowed layers give back")
        if limits.max_batch_tokens <= limits.max_seqs:
            raise ValueError(
                f"max_batch_tokens={limits.max_batch_tokens} leaves no room for prompts beside "
                f"max_seqs={limits.max_seqs} sequences"
            )
        self.limits = limits
        self.pool = pool
        self._groups = layer_groups(pool, reach, windowed)
        self._sequences: dict[SequenceId, Sequence] = {}
        self._prefilling = PrefillQueue(limits)
        self._decoding: dict[SequenceId, Sequence] = {}
        self._exports = Exports(self._groups, limits.max_exported_fraction)
        self._reuse = Reuse(cache, pool, siblings=all_kept(self._groups))
        self._growth = Growth(limits, self._groups)
        self._admission = Admission(limits, self._groups, self._exports, self._reuse, self._growth)
        self._copies = CopyQueue(self._groups)
        self._fresh_slots: list[Sequence] = []
        self._under_way = StepsUnderWay()
        self._events: list[Event] = []

    # ---- commands ----

    def add(self, request: SequenceRequest) -> None:
        """Queue a sequence, or answer with Failure (never possible) or Rejected (full).

        One that is here already is ignored.
        """
        if request.id in self._sequences:
            return
        self._admit()  # what has room does not wait: it must not count as waiting
        attempt, waiting = request.id.attempt, len(self._admission.waiting)
        beside = [s for s in self._sequences.values() if s.id.attempt == attempt]
        refusal = self._admission.refusal(request, beside) or self._transfer_in_use(request)
        if refusal is None and waiting < self.limits.max_waiting:
            self._sequences[request.id] = sequence = Sequence.of(request)
            self._admission.waiting.append(sequence)
            return
        if refusal is not None:
            self._events.append(Failure(attempt, FailureCode.INVALID, refusal))
        else:
            self._events.append(Rejected(attempt, f"{waiting} requests are waiting already"))
        self.abort(attempt)

    def abort(self, attempt: AttemptId) -> None:
        """Forget every sequence of `attempt`; idempotent."""
        for sequence in [s for s in self._sequences.values() if s.id.attempt == attempt]:
            self._end(sequence)

    def read(self, command: ReadKV) -> None:
        sequence = self._exports.get(command.transfer_id)
        if (
            sequence is None
            or not 0 <= command.start < command.stop <= sequence.computed
            or not self._copies.possible(command, sequence)
        ):
            self._events.append(KVRead(command.read_id, None))
        else:
            self._copies.read(command, sequence)

    def write(self, command: WriteKV) -> None:
        sequence = self._sequences.get(command.id)
        if (
            sequence is None
            or sequence.state is not SequenceState.IMPORTING
            or not sequence.reused <= command.start < command.stop <= len(sequence.tokens)
            or not self._copies.possible(command, sequence)
        ):
            self._events.append(KVWritten(command.import_id, ok=False))
        else:
            self._copies.write(command, sequence)

    def release_export(self, transfer_id: bytes) -> None:
        """The transfer has ended; idempotent, unknown ids are ignored."""
        sequence = self._exports.get(transfer_id)
        if sequence is not None:
            self._end(sequence)

    def begin_decode(self, command: BeginDecode) -> None:
        """Decode from the next step on; ignored when the sequence is gone.

        Answered by Failure when the first token ends the sequence or is no token.
        """
        sequence = self._sequences.get(command.id)
        if sequence is None or sequence.state is not SequenceState.IMPORTING:
            return
        sequence.computed = sequence.scheduled = len(sequence.tokens)
        self._reuse.leave(sequence)
        token = command.first_token
        sequence.tokens.append(token)
        usable = 0 <= token < self.limits.vocab_size
        if not usable or sequence.finish_after(token, self.limits.max_model_len) is not None:
            self._end(sequence)
            message = f"nothing can be decoded after first token {token}"
            self._events.append(Failure(command.id.attempt, FailureCode.TRANSFER, message))
            return
        self._start_decoding(sequence)

    # ---- a step ----

    @property
    def has_work(self) -> bool:
        """True when a step would do something."""
        return bool(
            self._under_way
            or self._decoding
            or self._prefilling
            or self._copies
            or self._events
            or self._admission.possible
        )

    def schedule(self) -> StepPlan:
        """Let grow what runs, admit what fits, and choose the entries of the next step.

        An empty plan is no step. Any other is under way from now on, and is to be committed
        after those before it.
        """
        decoding = self._growth.grow(self._preempt)  # before others take what is free
        self._admit()
        number = self._under_way.next_number
        rows = [self._row(sequence, sequence.length) for sequence in decoding]
        if self._copies.reads and not rows:
            # A reader must not wait for the next prompt, which may take long.
            exports = StepPlan(tuple(self._copies.take_exports(EXPORTS_PER_STEP, number)))
            self._under_way.add(exports, ())
            return exports
        imports = IMPORTS_PER_BUSY_STEP if rows else IMPORTS_PER_STEP
        entries: list[Entry] = [
            *self._copies.take_imports(imports, number),
            *self._copies.take_exports(EXPORTS_PER_STEP, number),
        ]
        rows += self._prefill_rows(self.limits.max_batch_tokens - len(rows))
        for sequence in self._fresh_slots:
            entries += slot_loads(sequence)
        self._fresh_slots.clear()
        if rows:
            # One-token rows first: kernels treat them apart from longer ones.
            rows.sort(key=lambda each: len(each[0].tokens) > 1)
            entries.append(RunBatch(tuple(row for row, _ in rows)))
        plan = StepPlan(tuple(entries))
        if entries:
            self._under_way.add(plan, (sequence for _, sequence in rows))
        return plan

    def commit(self, outcome: StepOutcome) -> None:
        """Take in what the devices answered to the first of the steps under way."""
        step = self._under_way.pop()
        for group in self._groups:
            group.pool.finished(step.number)
        for entry in step.plan.entries:
            if isinstance(entry, ExportKV):
                arrays = outcome.exported[entry.read_id]
                self._events.append(KVRead(entry.read_id, arrays))
            elif isinstance(entry, ImportKV):
                self._events.append(KVWritten(entry.import_id, ok=True))
        for row, sequence in step.rows:
            if sequence.state is not SequenceState.ENDED:
                self._commit_row(row, sequence, outcome)

    def take_events(self) -> tuple[Event, ...]:
        """Everything that has happened since the last call."""
        changed = self._reuse.changes()
        if changed is not None:
            self._events.append(changed)
        events = tuple(self._events)
        self._events.clear()
        return events

    def load(self) -> Load:
        """Blocks are counted at their owners: one that has got lost is missing in the sum."""
        waiting = self._admission.waiting
        uncomputed = (len(s.tokens) - s.computed for s in (*waiting, *self._prefilling))
        held = self._groups[0].held
        owned = sum(len(held(s)) for s in self._sequences.values()) - self.pool.shares
        return Load(
            waiting=len(waiting),
            running=self._admission.taken_slots,
            waiting_tokens=sum(uncomputed),
            free_blocks=self.pool.free,
            cached_blocks=self.pool.cached,
            running_blocks=owned - self.pool.exported + self.pool.retired,
            exported_blocks=self.pool.exported,
            # While prompts are computed it is they that the next one waits for.
            export_limited=self._exports.full and not self._prefilling,
            prefix_queries=self._reuse.queries,
            prefix_hits=self._reuse.hits,
        )

    def check_invariants(self) -> None:
        """Recount blocks, slots and queues from the sequences alone.

        Raises:
            AssertionError: something is lost, owned twice or in two places.
        """
        sequences = self._sequences.values()
        check_blocks(sequences, self._groups, self._under_way)
        check_queue(sequences, SequenceState.WAITING, self._admission.waiting)
        check_queue(sequences, SequenceState.PREFILLING, self._prefilling)
        check_queue(sequences, SequenceState.DECODING, self._decoding.values())
        self._admission.check_slots([s.slot for s in sequences if s.slot >= 0])
        self._reuse.check_invariants(sequences)
        self._growth.check_owners(sequences)
        self._exports.check_owners(sequences)
        self._copies.check_owners(sequences)

    # ---- in and out ----

    def _transfer_in_use(self, request: SequenceRequest) -> str | None:
        if request.roles is Role.PREFILL and any(
            s.request.transfer_id == request.transfer_id and not s.decodes_here
            for s in self._sequences.values()
        ):
            return "its transfer_id names another transfer"
        return None

    def _admit(self) -> None:
        for sequence in self._admission.admitted():
            self._growth.begin(sequence)
            sequence.admitted = time.monotonic()
            if Role.PREFILL in sequence.request.roles:
                sequence.enter(SequenceState.PREFILLING)
                self._prefilling.append(sequence)
                self._fresh_slots.append(sequence)
            else:
                sequence.enter(SequenceState.IMPORTING)
            transfer_id, reused = sequence.request.transfer_id, sequence.reused
            self._events.append(Admitted(sequence.id, transfer_id, len(sequence.tokens), reused))
            if not sequence.decodes_here:
                self._exports.add(sequence)
                if reused:
                    self._events.append(Computed(transfer_id, reused))

    def _preempt(self, sequence: Sequence) -> None:
        """Older or more important sequences need its blocks."""
        message = "its KV blocks were needed by older or more important sequences"
        self._events.append(Failure(sequence.id.attempt, FailureCode.PREEMPTED, message))
        self.abort(sequence.id.attempt)

    def _end(self, sequence: Sequence) -> None:
        """The one way out: give everything back and forget the sequence."""
        if sequence.state is SequenceState.WAITING:
            self._admission.waiting.remove(sequence)
        elif sequence.state is SequenceState.PREFILLING:
            self._prefilling.remove(sequence)
        self._decoding.pop(sequence.id, None)
        self._growth.end(sequence)
        self._exports.discard(sequence)
        self._events += self._copies.drop(sequence)
        if sequence in self._fresh_slots:
            self._fresh_slots.remove(sequence)
        self._admission.free_slot(sequence)
        self._reuse.end(sequence)
        exported = sequence.state is SequenceState.EXPORTED
        for group in self._groups:
            group.release(sequence, exported=exported)
        sequence.tables, sequence.given_back = no_tables(), 0
        sequence.enter(SequenceState.ENDED)
        del self._sequences[sequence.id]

    # ---- entries ----

    def _prefill_rows(self, budget: int) -> list[_Row]:
        rows: list[_Row] = []
        for sequence, count in self._prefilling.shares(budget):
            stop = sequence.scheduled + count
            for group in self._groups:
                group.reuse(sequence, sequence.scheduled, stop)
            rows.append(self._row(sequence, stop))
            if stop == len(sequence.tokens) and sequence.decodes_here:
                self._prefilling.remove(sequence)
                self._start_decoding(sequence)
        return rows

    def _row(self, sequence: Sequence, stop: int) -> _Row:
        """Compute tokens [sequence.scheduled, stop), and sample if they are all there are."""
        row = batch_row(sequence, stop, self._groups)
        sequence.unread += row.sampling is not None
        sequence.scheduled = stop
        sequence.last_step = self._under_way.next_number
        return row, sequence

    # ---- results ----

    def _commit_row(self, row: BatchRow, sequence: Sequence, outcome: StepOutcome) -> None:
        sequence.computed = row.stop
        self._reuse.leave(sequence)
        exporting = not sequence.decodes_here
        if exporting:
            computed = Computed(sequence.request.transfer_id, sequence.computed)
            self._events.append(computed)
        if row.targets:
            self._events.append(outcome.prompt_logprobs[row.id])
        if row.sampling is None:
            return
        cached = self._reuse.of_prompt(sequence)
        delta = take_token(sequence, outcome, cached, self.limits.max_model_len)
        self._events.append(delta)
        if exporting:
            self._events.append(Prefilled(sequence.request.transfer_id, delta))
        if delta.finish is not None:
            self._end(sequence)
        elif exporting:
            self._prefilling.remove(sequence)
            self._park(sequence)

    def _start_decoding(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.IMPORTING:
            self._fresh_slots.append(sequence)
        sequence.enter(SequenceState.DECODING)
        self._decoding[sequence.id] = sequence

    def _park(self, sequence: Sequence) -> None:
        """Keep a prefilled sequence's blocks for its reader, and nothing else."""
        for group in self._groups:
            group.give_back(sequence, sequence.computed)
            group.pool.export(group.held(sequence).tolist())
        sequence.enter(SequenceState.EXPORTED)
        self._admission.free_slot(sequence)
