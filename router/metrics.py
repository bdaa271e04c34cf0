"""The router's Prometheus metrics, under the names that other tools read."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.cached_prefixes import CachedPrefixes
from router.load import PoolLoad
from router.load_metrics import LoadCollector
from router.prefix_metrics import PrefixCollector, PrefixIndexCollector, PrefixTotals
from router.tallies import HistogramTally, Tally
from router.transfers import TransferCollector, TransferTotals
from router.worker_metrics import WorkerCollector
from router.workers import WorkerPool

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

FINISHED_REASONS = ("stop", "length", "abort", "deadline", "error")
"""How a request ends; "deadline" is that of its own deadline_ms, and no fault of the server."""


class RouterMetrics:
    """All metrics of one router, in a registry of their own.

    Requests are recorded by the gateway; whatever else is known is asked for when rendered.
    """

    def __init__(self, model_name: str, engine: str = "0") -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine}
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens taken.")
        self._generation_tokens = Tally("vllm:generation_tokens", "Tokens generated.", self._labels)
        self.registry.register(self._generation_tokens)
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Request to first token.", _TTFT_BUCKETS
        )
        self._itl = HistogramTally(
            "vllm:inter_token_latency_seconds",
            "One output token to the next.",
            self._labels,
            _ITL_BUCKETS,
        )
        self.registry.register(self._itl)
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds",
            "Request to its prompt's admission by a worker.",
            _REQUEST_BUCKETS,
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Admission to first token.", _REQUEST_BUCKETS
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Request to last token.", _REQUEST_BUCKETS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First token to last token.", _REQUEST_BUCKETS
        )
        success = Counter(
            "vllm:request_success",
            "Requests ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._success = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in FINISHED_REASONS
        }
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "The KV cache's size, in the labels.",
            [*self._labels, "block_size", "num_gpu_blocks"],
            registry=self.registry,
        )

        lora = Gauge(
            "vllm:lora_requests_info",
            "Adapters, in the labels: none can be loaded. The value is when that was found.",
            [*self._labels, "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            registry=self.registry,
        )
        lora.labels(
            **self._labels, max_lora="0", running_lora_adapters="", waiting_lora_adapters=""
        ).set_to_current_time()

    def export_load(self, load: Callable[[], PoolLoad], waiting_here: Callable[[], int]) -> None:
        """Render the workers' load from now on, and who waits here, as they are then; once."""
        self.registry.register(LoadCollector(load, waiting_here, self._labels))

    def export_workers(self, pool: WorkerPool) -> None:
        """Render the states of the pool's workers from now on, as they are at the time; once."""
        self.registry.register(WorkerCollector(pool, self._labels))

    def export_prefixes(self, totals: PrefixTotals) -> None:
        """Render `totals` from now on, as they are at the time; once."""
        self.registry.register(PrefixCollector(totals, self._labels))

    def export_prefix_index(self, prefixes: CachedPrefixes) -> None:
        """Render what is known of cached blocks from now on, as it is at the time; once."""
        self.registry.register(PrefixIndexCollector(prefixes, self._labels))

    def export_transfers(self, totals: TransferTotals) -> None:
        """Render `totals` from now on, as they are at the time; once."""
        self.registry.register(TransferCollector(totals, self._labels))

    def set_cache_config(self, *, block_size: int, num_blocks: int) -> None:
        """Set what a worker's KV cache holds; replaces what was set before."""
        self._cache_config.clear()
        self._cache_config.labels(
            **self._labels, block_size=str(block_size), num_gpu_blocks=str(num_blocks)
        ).set(1)

    def prompt(self, tokens: int) -> None:
        """A prompt was handed to the workers."""
        self._prompt_tokens.inc(tokens)

    def tokens(self, count: int, since_last_s: float, *, first: bool) -> None:
        """Output tokens came in one delta.

        `since_last_s` counts from the tokens before, or from the request's arrival when
        these are the `first`.
        """
        self._generation_tokens.count += count
        if first:
            self._ttft.observe(since_last_s)
        else:
            self._itl.observe(since_last_s / count, count)

    def prefilled(self, prefill_s: float, since_arrival_s: float) -> None:
        """A request's first token came; `prefill_s` before it a worker had begun its prompt."""
        self._prefill.observe(prefill_s)
        self._queue.observe(max(0.0, since_arrival_s - prefill_s))

    def finished(self, reason: str, seconds: float, decode_s: float | None) -> None:
        """A request ended, one of FINISHED_REASONS; `seconds` after it arrived.

        `decode_s` is the time from its first token to its last; None without a token.
        """
        self._success[reason].inc()
        self._e2e.observe(seconds)
        if decode_s is not None:
            self._decode.observe(decode_s)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text, list(self._labels), registry=self.registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            name, text, list(self._labels), buckets=buckets, registry=self.registry
        )
        return histogram.labels(**self._labels)
