"""The four serving workloads, each a coroutine from a client to its figures.

Prompts are random words that are one token each with a leading space, different
in every request, so no prefix cache helps.

w1  one request at a time: prompt 128, output 128, 5 runs
w2  16 requests at once: prompt 256, output 128
w3  one long prompt at a time: prompt 2000, output 8, 3 runs
w4  8 streams decoding without end while a 2000-token prompt arrives every 2 s
    for 20 s; TTFT is the long prompts', ITL and output tok/s are the streams'

Latencies are of requests that succeeded. In w4 the streams are broken off at the end
and so have no usage; their tokens are events times the tokens per event of the
round's requests that have.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.openai_stream import OpenAIStreamClient, RequestTiming
from benchmarks.stats import median, milliseconds, percentile, ratio

WORKLOADS = ("w1", "w2", "w3", "w4")

Figures = dict[str, float | None]
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Requests of one size, one after another or all at once."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrent: bool = False

    @property
    def ticks(self) -> int:
        """Steps of progress in one run."""
        return self.requests


@dataclass(frozen=True, slots=True)
class MixedShape:
    """Decoding streams with long prompts arriving between them. Times in seconds."""

    streams: int = 8
    stream_prompt_tokens: int = 64
    stream_output_tokens: int = 1024
    long_prompts: int = 10
    long_prompt_tokens: int = 2000
    long_output_tokens: int = 8
    period: float = 2.0
    settle: float = 4.0
    """From the streams' start to the first long prompt."""
    quiet: float = 2.5
    """The end of `settle`, in which the streams' undisturbed ITL is taken."""
    drain: float = 60.0
    """The longest wait for long prompts, and then streams, still under way at the end."""

    @property
    def ticks(self) -> int:
        """Steps of progress in one run."""
        return self.long_prompts


Shapes = dict[str, BatchShape | MixedShape]

FULL: Shapes = {
    "w1": BatchShape(requests=5, prompt_tokens=128, output_tokens=128),
    "w2": BatchShape(requests=16, prompt_tokens=256, output_tokens=128, concurrent=True),
    "w3": BatchShape(requests=3, prompt_tokens=2000, output_tokens=8),
    "w4": MixedShape(),
}
QUICK: Shapes = {
    "w1": BatchShape(requests=2, prompt_tokens=128, output_tokens=32),
    "w2": BatchShape(requests=8, prompt_tokens=128, output_tokens=32, concurrent=True),
    "w3": BatchShape(requests=1, prompt_tokens=1000, output_tokens=8),
    "w4": MixedShape(streams=4, long_prompts=3, long_prompt_tokens=1000, settle=2.0, quiet=1.0),
}
"""Smaller sizes of the same workloads: a smoke test, not for comparing with full ones."""


@dataclass(slots=True)
class WorkloadResult:
    """One run of one workload against one server."""

    figures: Figures
    requests: list[RequestTiming]
    errors: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Not one of the requests whose TTFT counts succeeded."""
        return self.figures["ttft_p50_ms"] is None


@cache
def _words() -> tuple[str, ...]:
    return tuple(Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split())


def random_prompt(rng: random.Random, tokens: int) -> str:
    """A prompt of that many random one-token words."""
    return "".join(f" {word}" for word in rng.choices(_words(), k=tokens))


async def run_workload(
    client: OpenAIStreamClient, shape: BatchShape | MixedShape, rng: random.Random, tick: Tick
) -> WorkloadResult:
    """Run one workload once; `tick` is called for every step of progress."""
    if isinstance(shape, MixedShape):
        return await _run_mixed(client, shape, rng, tick)
    return await _run_batch(client, shape, rng, tick)


async def _run_batch(
    client: OpenAIStreamClient, shape: BatchShape, rng: random.Random, tick: Tick
) -> WorkloadResult:
    bodies = [
        client.encode(random_prompt(rng, shape.prompt_tokens), shape.output_tokens)
        for _ in range(shape.requests)
    ]

    async def send(body: bytes) -> RequestTiming:
        timing = await client.send(body, shape.output_tokens)
        tick()
        return timing

    if shape.concurrent:
        requests = list(await asyncio.gather(*map(send, bodies)))
    else:
        requests = [await send(body) for body in bodies]
    succeeded = [timing for timing in requests if timing.error is None]
    figures = _latencies(succeeded)
    figures["output_tok_s"] = _output_rate(succeeded, shape.concurrent)
    figures["prefill_tok_s"] = (
        _concurrent_prefill_rate(succeeded) if shape.concurrent else _prefill_rate(succeeded)
    )
    return WorkloadResult(
        figures,
        requests,
        errors=[timing.error for timing in requests if timing.error],
        notes=_notes(succeeded, shape.prompt_tokens),
    )


async def _run_mixed(
    client: OpenAIStreamClient, shape: MixedShape, rng: random.Random, tick: Tick
) -> WorkloadResult:
    stop = asyncio.Event()
    streams: list[RequestTiming] = []

    def encode_long() -> bytes:
        return client.encode(random_prompt(rng, shape.long_prompt_tokens), shape.long_output_tokens)

    async def decode() -> None:
        while not stop.is_set():
            prompt = random_prompt(rng, shape.stream_prompt_tokens)
            body = client.encode(prompt, shape.stream_output_tokens)
            streams.append(await client.send(body, shape.stream_output_tokens, stop))
            if streams[-1].error:
                return

    decoders = [asyncio.create_task(decode()) for _ in range(shape.streams)]
    bodies = [encode_long() for _ in range(shape.long_prompts)]
    arrivals: list[asyncio.Task[RequestTiming]] = []
    try:
        await asyncio.sleep(shape.settle)
        start = time.perf_counter()
        for index, body in enumerate(bodies):
            await _sleep_until(start + index * shape.period)
            if all(decoder.done() for decoder in decoders):
                break
            arrivals.append(asyncio.create_task(client.send(body, shape.long_output_tokens)))
            tick()
        else:
            await _sleep_until(start + shape.long_prompts * shape.period)
        end = time.perf_counter()
        late = await _finish(arrivals, shape.drain)
        stop.set()
        stuck = await _finish(decoders, shape.drain)
    finally:
        for task in (*decoders, *arrivals):
            task.cancel()
    long = [task.result() for task in arrivals if not task.cancelled()]
    errors = [timing.error for timing in (*streams, *long) if timing.error]
    errors += [f"long prompt unfinished {shape.drain:g} s after the end"] * late
    errors += [f"stream without an event for {shape.drain:g} s"] * stuck
    return WorkloadResult(
        _mixed_figures(shape, streams, long, start, end),
        [*streams, *long],
        errors=errors,
        notes=_notes([timing for timing in long if timing.error is None], shape.long_prompt_tokens),
    )


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.perf_counter()))


async def _finish(tasks: list[asyncio.Task], patience: float) -> int:
    """Wait for the tasks, cancel those not done in time and count them."""
    if not tasks:
        return 0
    _, pending = await asyncio.wait(tasks, timeout=patience)
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
    return len(pending)


def _mixed_figures(
    shape: MixedShape,
    streams: list[RequestTiming],
    long: list[RequestTiming],
    start: float,
    end: float,
) -> Figures:
    """Figures of w4 over the window from the first long prompt to a period after the last.

    A gap counts when any part of it lies in the window, so a stall that outlasts
    the window is not lost.
    """
    busy: list[float] = []
    quiet: list[float] = []
    events = 0
    for timing in streams:
        events += sum(start <= moment <= end for moment in timing.event_times)
        for earlier, later in timing.gaps:
            if earlier <= end and later >= start:
                busy.append(later - earlier)
            elif start - shape.quiet <= earlier and later < start:
                quiet.append(later - earlier)
    succeeded = [timing for timing in long if timing.error is None]
    per_event = _tokens_per_event([*streams, *long]) or 1.0
    figures = _latencies(succeeded)
    figures |= {
        "tpot_p50_ms": None,
        "tpot_p99_ms": None,
        "itl_p50_ms": milliseconds(percentile(busy, 50)),
        "itl_p99_ms": milliseconds(percentile(busy, 99)),
        "output_tok_s": events * per_event / (end - start) if events else None,
        "prefill_tok_s": _prefill_rate(succeeded),
        "itl_max_ms": milliseconds(max(busy, default=None)),
        "itl_quiet_p50_ms": milliseconds(percentile(quiet, 50)),
        "itl_quiet_p99_ms": milliseconds(percentile(quiet, 99)),
    }
    return figures


def _latencies(requests: list[RequestTiming]) -> Figures:
    ttfts = [timing.ttft for timing in requests if timing.ttft is not None]
    tpots = [timing.tpot for timing in requests if timing.tpot is not None]
    itls = [itl for timing in requests for itl in timing.itls]
    return {
        "ttft_p50_ms": milliseconds(percentile(ttfts, 50)),
        "ttft_p99_ms": milliseconds(percentile(ttfts, 99)),
        "tpot_p50_ms": milliseconds(percentile(tpots, 50)),
        "tpot_p99_ms": milliseconds(percentile(tpots, 99)),
        "itl_p50_ms": milliseconds(percentile(itls, 50)),
        "itl_p99_ms": milliseconds(percentile(itls, 99)),
    }


def _output_rate(requests: list[RequestTiming], concurrent: bool) -> float | None:
    """Output tokens a second from sending to the last event, overall or summed per request."""
    if not requests:
        return None
    if concurrent:
        first = min(timing.sent for timing in requests)
        seconds = max(timing.event_times[-1] for timing in requests) - first
    else:
        seconds = sum(timing.event_times[-1] - timing.sent for timing in requests)
    return ratio(sum(timing.tokens for timing in requests), seconds)


def _prefill_rate(requests: list[RequestTiming]) -> float | None:
    """Median of prompt tokens, by usage, over TTFT."""
    return median(ratio(timing.prompt_tokens, timing.ttft) for timing in requests)


def _concurrent_prefill_rate(requests: list[RequestTiming]) -> float | None:
    """All prompt tokens over the time until the last request had its first token."""
    prompts = [timing.prompt_tokens for timing in requests if timing.prompt_tokens is not None]
    if not prompts or len(prompts) < len(requests):
        return None
    seconds = max(timing.event_times[0] for timing in requests) - min(
        timing.sent for timing in requests
    )
    return ratio(sum(prompts), seconds)


def _tokens_per_event(requests: list[RequestTiming]) -> float | None:
    counted = [timing for timing in requests if timing.output_tokens and not timing.error]
    events = sum(len(timing.event_times) for timing in counted)
    return ratio(sum(timing.tokens for timing in counted), events)


def _notes(requests: list[RequestTiming], prompt_tokens: int) -> list[str]:
    """What a reader must know before comparing these figures with others."""
    notes = []
    unmetered = sum(timing.output_tokens is None for timing in requests)
    if unmetered:
        notes.append(f"{unmetered} requests without usage: tokens counted from events")
    short = sum(timing.tokens < timing.asked_tokens for timing in requests)
    if short:
        notes.append(f"{short} requests ended before the output length asked for")
    per_event = _tokens_per_event(requests)
    if per_event is not None and per_event > 1.1:
        notes.append(f"{per_event:.1f} tokens per event: ITL is between events, not tokens")
    measured = median(timing.prompt_tokens for timing in requests)
    if measured is not None and abs(measured - prompt_tokens) > 0.1 * prompt_tokens:
        notes.append(f"prompts were {measured:.0f} tokens by the server's count")
    return notes
