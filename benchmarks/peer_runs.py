"""Rounds of the workloads over servers that are running, for benchmarks.peers."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence

import httpx

from benchmarks.machine_floors import Floors, measuring
from benchmarks.model_cost import ModelCost
from benchmarks.openai_stream import OpenAIStreamClient
from benchmarks.peer_report import PeerReport
from benchmarks.peer_servers import (
    COLOCATED,
    DISAGG,
    HEXSERVE,
    INT8,
    LLAMA_BF16,
    LLAMA_Q8,
    VLLM,
    VLLM_256,
    RunningServer,
)
from benchmarks.peer_targets import MACHINE, SAMPLED, stream_bound_ms
from benchmarks.process_tree import cpu_seconds
from benchmarks.serve import warm_up
from benchmarks.workloads import (
    BatchShape,
    Figures,
    MixedShape,
    Shapes,
    WorkloadResult,
    run_workload,
)

CONTENDERS: dict[str, tuple[str, ...]] = {
    "w1": (COLOCATED, MACHINE, DISAGG, VLLM, INT8, LLAMA_Q8, LLAMA_BF16),
    "w2": (COLOCATED, VLLM, DISAGG, *SAMPLED.values(), LLAMA_Q8, LLAMA_BF16),
    "w3": (MACHINE, COLOCATED, VLLM, DISAGG, LLAMA_Q8, LLAMA_BF16),
    "w4": (MACHINE, DISAGG, VLLM, VLLM_256),
}
"""Who runs each workload, in the order of a round; the machine stands by whom it judges."""

_SERVER = {sampled: label for label, sampled in SAMPLED.items()}
"""Contenders that are another's server, asked differently."""
_SAMPLING = {"temperature": 0.8, "top_p": 0.95}
_CHUNK = 512  # tokens that hexserve computes at once of a long prompt
_SETTLE_S, _SETTLE_TRIES = 0.5, 20
_MOST_SETTLING = 0.1
"""Of a core, by all servers together, once they are idle."""
_MOST_IDLE = 0.02
"""Of a core, by one that is idle; more is noted."""
_COMPILES = re.compile(r"^hexserve:compiles_after_ready\{.*\} (\S+)$", re.MULTILINE)


def servers_of(workloads: Sequence[str]) -> set[str]:
    """The servers that take part in one of the workloads."""
    names = {name for workload in workloads for name in CONTENDERS[workload]}
    return {_SERVER.get(name, name) for name in names} - {MACHINE}


async def run_rounds(
    servers: Mapping[str, RunningServer],
    shapes: Shapes,
    rounds: Mapping[str, int],
    cost: ModelCost,
    rng: random.Random,
    on_run: Callable[[str], None],
) -> PeerReport:
    """Every workload of `rounds` so many times on every contender whose server is there.

    Args:
        on_run: told what runs next.

    Raises:
        ServerError: a server does not answer its first request.
    """
    report = PeerReport()
    # A connection for each request: servers close idle ones between two rounds, each in its time.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    cores = len(os.sched_getaffinity(0))
    long = shapes["w3"]
    assert isinstance(long, BatchShape)
    async with httpx.AsyncClient(timeout=600.0, limits=limits, trust_env=False) as http:
        with measuring((cores // 2, cores), cost.matmuls, (_CHUNK, long.prompt_tokens)) as floors:
            bench = _Bench(http, servers, floors, cost, shapes, rng)
            for name in servers:
                await bench.warm_up(name)
            for workload, times in rounds.items():
                for number in range(1, times + 1):
                    title = f"{workload} {number}/{times}"
                    report.add(workload, *await bench.round(workload, title, on_run))
    return report


def machine_figures(
    measured: Mapping[str, float], cost: ModelCost, shapes: Shapes, cores: int
) -> Figures:
    """What the machine needs at least, in ms: to read w1's step and to multiply w3's prompt.

    Args:
        measured: as benchmarks.machine_floors gives it.
    """
    step, prompt = shapes["w1"], shapes["w3"]
    assert isinstance(step, BatchShape)
    assert isinstance(prompt, BatchShape)
    nbytes = cost.decode_bytes(step.prompt_tokens + step.output_tokens / 2)
    flops = cost.prompt_flops(prompt.prompt_tokens)
    return {
        "read_all_ms": 1000 * nbytes / measured[f"read_{cores}"],
        "read_half_ms": 1000 * nbytes / measured[f"read_{cores // 2}"],
        "matmul_all_ms": 1000 * flops / measured[f"matmul_{cores}"],
        "matmul_half_ms": 1000 * flops / measured[f"matmul_{cores // 2}"],
    }


def with_derived(result: WorkloadResult, shape: BatchShape | MixedShape) -> WorkloadResult:
    """Adds w4's figures that only its targets need."""
    if isinstance(shape, MixedShape):
        result.figures["itl_bound_ms"] = stream_bound_ms(result.figures)
        result.figures["long_answered"] = sum(
            timing.error is None and timing.asked_tokens == shape.long_output_tokens
            for timing in result.requests
        )
    return result


class _Bench:
    """Runs a workload on one contender after the other."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        servers: Mapping[str, RunningServer],
        floors: Floors,
        cost: ModelCost,
        shapes: Shapes,
        rng: random.Random,
    ) -> None:
        self._http = http
        self._servers = servers
        self._floors = floors
        self._cost = cost
        self._shapes = shapes
        self._rng = rng
        self._models: dict[str, str] = {}

    async def warm_up(self, label: str) -> None:
        client = OpenAIStreamClient(self._http, self._servers[label].url)
        await warm_up(client, self._rng)
        self._models[label] = client.model

    async def round(
        self, workload: str, title: str, on_run: Callable[[str], None]
    ) -> tuple[dict[str, WorkloadResult], Figures]:
        """Contender → result of everyone whose server is there, and the machine's figures."""
        results: dict[str, WorkloadResult] = {}
        machine: Figures = {}
        for name in CONTENDERS[workload]:
            if name != MACHINE and _SERVER.get(name, name) not in self._servers:
                continue
            on_run(f"{title} {name}")
            await self._settle()
            if name == MACHINE:
                cores = len(os.sched_getaffinity(0))
                machine = machine_figures(self._floors.measure(), self._cost, self._shapes, cores)
            else:
                results[name] = await self._run(workload, name)
        return results, machine

    async def _run(self, workload: str, name: str) -> WorkloadResult:
        """The result, with a note of each other server that has used the cores meanwhile."""
        label = _SERVER.get(name, name)
        shape = self._shapes[workload]
        sampled = name in _SERVER
        client = OpenAIStreamClient(
            self._http,
            self._servers[label].url,
            model=self._models[label],
            extra=_SAMPLING if sampled else None,
            seeds=self._rng if sampled else None,
        )
        others = [each for each in self._servers if each != label]
        began, before = time.perf_counter(), self._cpu_seconds()
        result = with_derived(await run_workload(client, shape, self._rng, _ignore), shape)
        seconds, after = time.perf_counter() - began, self._cpu_seconds()
        for each in others:
            share = (after[each] - before[each]) / seconds
            if share > _MOST_IDLE:
                result.notes.append(f"{each} used {share:.0%} of a core meanwhile")
        if label in HEXSERVE:
            result.figures["compiles"] = await self._compiles(label)
        return result

    async def _settle(self) -> None:
        """Until no server computes: threads of some spin for a while after their last request."""
        for _ in range(_SETTLE_TRIES):
            before = sum(self._cpu_seconds().values())
            await asyncio.sleep(_SETTLE_S)
            if sum(self._cpu_seconds().values()) - before <= _MOST_SETTLING * _SETTLE_S:
                return

    def _cpu_seconds(self) -> dict[str, float]:
        return {label: cpu_seconds(server.process.pid) for label, server in self._servers.items()}

    async def _compiles(self, label: str) -> float | None:
        """Programs that a hexserve server compiled after it was ready; None if it does not tell."""
        try:
            answer = await self._http.get(f"{self._servers[label].url}/metrics")
        except httpx.HTTPError:
            return None
        found = _COMPILES.search(answer.text)
        return float(found[1]) if found else None


def _ignore() -> None:
    """The report shows runs, not requests, as progress."""
