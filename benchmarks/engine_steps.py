"""What benchmarks.engine measures, in a process of its own: an engine's steps and their floors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.kernel_floors import MIB, library_matmul, reading
from benchmarks.stats import median
from benchmarks.step_gaps import gaps
from engine.build import BuiltEngine, build_engine
from engine.events import Add
from engine.jax_runner import JaxRunner
from engine.plan import BatchRow, RowSampling, RunBatch, StepPlan
from engine.types import COLOCATED, AttemptId, SamplingParams, SequenceId, SequenceRequest
from settings.config import EngineConfig, ModelConfig

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20)
SETTLING_STEPS = 8
"""Until the engine knows how long its steps take."""
FLOOR_MATMUL = (512, 1536, 4096)
"""Rows, inputs and outputs of the matmul that stands for the best that the cores can do."""


@dataclass(frozen=True, slots=True)
class Step:
    """A batch: `rows` sequences that compute `tokens` each, the last of them at `context`."""

    rows: int
    tokens: int
    context: int

    @property
    def name(self) -> str:
        if self.tokens == 1:
            return f"decode {self.rows} x {self.context}"
        return f"prefill {self.tokens}"


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch, medians in seconds.

    Attributes:
        step: all of it: packing, the two programs, reading the tokens back.
        device: the programs alone.
        floor: the longer of reading weights and KV once at the measured bandwidth, and of the
            floating-point operations at the measured best matmul's rate.
        limit: which of the two that is.
    """

    name: str
    step: float
    device: float
    floor: float
    limit: str

    @property
    def share(self) -> float:
        """Of the floor's speed."""
        return self.floor / self.step


def measure(
    folder: str,
    flags: tuple[ModelConfig, EngineConfig],
    steps: Sequence[Step],
    rounds: int,
    threads: int,
    trace: str | None,
) -> tuple[list[Measured], float]:
    """Each step beside its floor, and the gap between two decode steps of 16 sequences.

    `trace`: a folder for jax's profiler, which then records the steps' last rounds.
    """
    built = build_engine(Path(folder), *flags, COLOCATED)
    runner = built.runner
    assert isinstance(runner, JaxRunner)
    runner.warm_up()
    unwatched = runner._programs
    programs = _Watched(unwatched)
    runner._programs = programs  # type: ignore[assignment]
    bench = _Bench(built, runner, programs, threads)
    measured = [bench.step(step, rounds) for step in steps]
    if trace:
        with jax.profiler.trace(trace):
            for step in steps:
                runner.run(bench.plan(step))
    runner._programs = unwatched  # which does not wait for what it dispatches
    return measured, gap(built, 16)


class _Bench:
    def __init__(
        self, built: BuiltEngine, runner: JaxRunner, programs: _Watched, threads: int
    ) -> None:
        self._runner = runner
        self._programs = programs
        self._block_size = built.limits.block_size
        self._blocks = built.limits.num_blocks
        self._token_bytes = sum(array.bytes_per_token for array in built.arrays)
        # An embedding of its own is no matmul, and is read by rows.
        matrices = {name: p for name, p in runner._params.items() if hasattr(p, "matrix")}
        arrays = jax.tree.leaves([p.matrix for p in matrices.values()])
        self._weight_bytes = float(sum(array.nbytes for array in arrays))
        head = matrices["head"].matrix
        self._head_flops = 2.0 * math.prod(head.shape)
        self._layer_flops = 2.0 * sum(math.prod(a.shape) for a in arrays) - self._head_flops
        kv = built.arrays[0]
        query_heads = runner._params["q"].features * jax.device_count() // kv.width
        self._attention_flops = 4.0 * kv.layers * query_heads * kv.width
        self._read = reading(float(256 * MIB))
        rows, into, out = FLOOR_MATMUL
        rng = np.random.default_rng(0)
        kind = runner._params["q"].matrix.dtype
        x = rng.standard_normal((rows, into), np.float32).astype(kind)
        weight = rng.standard_normal((out, into), np.float32).astype(kind)
        self._matmul = library_matmul(x, weight, 4, threads)

    def plan(self, step: Step) -> StepPlan:
        needed = -(-step.context // self._block_size)
        rows = []
        for index in range(step.rows):
            first = index * needed
            blocks = (first + np.arange(needed, dtype=np.int32)) % self._blocks
            tokens = tuple(range(5, 5 + step.tokens))
            start = step.context - step.tokens
            sampling = RowSampling(GREEDY, 0, step.context)
            rows.append(BatchRow(_sequence(index), tokens, start, blocks, index, sampling))
        return StepPlan((RunBatch(tuple(rows)),))

    def step(self, step: Step, rounds: int) -> Measured:
        plan, whole, device, memory, compute = self.plan(step), [], [], [], []
        tokens = step.rows * step.tokens
        nbytes = self._weight_bytes + step.rows * step.context * self._token_bytes
        flops = tokens * self._layer_flops + step.rows * self._head_flops
        # Each token sees those before it: of a whole prompt, half on average.
        seen = step.context if step.tokens == 1 else step.context - step.tokens / 2
        flops += tokens * seen * self._attention_flops
        matmul_flops = 4 * 2.0 * math.prod(FLOOR_MATMUL)
        self._runner.run(plan)
        for _ in range(rounds):
            began = time.perf_counter()
            self._runner.run(plan)
            whole.append(time.perf_counter() - began)
            device.append(self._programs.busy)
            memory.append(self._read() * nbytes / (256 * MIB))
            compute.append(self._matmul() * flops / matmul_flops)
        floors = {"memory": median(memory) or 0.0, "compute": median(compute) or 0.0}
        limit = max(floors, key=lambda name: floors[name])
        return Measured(
            step.name, median(whole) or 0.0, median(device) or 0.0, floors[limit], limit
        )


def gap(built: BuiltEngine, sequences: int, steps: int = 60) -> float:
    """The median time between two decode steps in which no program runs, in seconds."""
    for index in range(sequences):
        prompt = tuple(range(10, 42))
        request = SequenceRequest(_sequence(index), COLOCATED, prompt, GREEDY, (), b"")
        built.engine.submit(Add(request))
    while built.engine.load().waiting_tokens or built.engine.load().running < sequences:
        built.engine.step()
    for _ in range(SETTLING_STEPS):
        built.engine.step()
    return median(gaps(built.engine.step, steps)) or 0.0


def _sequence(index: int) -> SequenceId:
    return SequenceId(AttemptId(f"r{index}", 0), 0)


class _Watched:
    """A runner's programs, and when the forward pass and sampling of the last batch ran."""

    def __init__(self, programs: Any) -> None:
        self._programs = programs
        self.began = self.ended = 0.0

    @property
    def busy(self) -> float:
        return self.ended - self.began

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def forward(self, *arguments: Any) -> Callable[..., Any]:
        program = self._programs.forward(*arguments)

        def run(*operands: Any) -> Any:
            self.began = time.perf_counter()
            return program(*operands)

        return run

    def sample(self, *arguments: Any) -> Callable[..., Any]:
        program = self._programs.sample(*arguments)

        def run(*operands: Any) -> Any:
            result = jax.block_until_ready(program(*operands))
            self.ended = time.perf_counter()
            return result

        return run
