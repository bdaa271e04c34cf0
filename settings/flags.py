"""The table of flags; the model's are in settings/model_flags.py, HTTP's in http_flags.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from settings.config import BLOCK_SIZES
from settings.flag_values import (
    to_addresses,
    to_cpus,
    to_level,
    to_positive,
    to_seconds,
    to_share,
    to_step_limit,
    to_transports,
    to_whole,
)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Attributes:
        type: text → value; None for a switch, which takes no value or true/false.
        default: None where "unset" means something of its own.
        supported: the values that are served today; any other is refused by name.
            Empty means all of them.
    """

    name: str
    help: str
    type: Callable[[str], Any] | None = str
    default: Any = None
    choices: Sequence[Any] | None = None
    supported: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Flags that stand together under a title in the help."""

    title: str
    flags: tuple[Flag, ...]


def switch(name: str, help: str, default: bool, supported: tuple[bool, ...] = ()) -> Flag:
    """A flag that is on or off."""
    return Flag(name, help, None, default, supported=supported)


ENGINE = Group(
    "engine of each worker",
    (
        Flag("tensor_parallel_size", "devices per worker", to_positive, 1),
        Flag(
            "kv_cache_dtype", "of the KV cache; auto is the weights'", default="auto",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
        Flag(
            "kernels", "auto is the platform's own; reference is slow and runs everywhere",
            default="auto", choices=("auto", "reference", "cpu"),
        ),
        switch("enable_jit", "compile the programs", True, (True,)),
        switch("warmup", "compile everything before the first request", True),
        Flag("max_prefill_seqs", "most sequences prefilled in one step", to_positive, 1),
        Flag("prefill_seqs_padding", "granularity of prompts in a step", to_positive, 8),
        Flag("prefill_len_padding", "granularity of prompt tokens (512; CPU: 64)", to_positive),
        Flag("decode_seqs_padding", "granularity of decoding sequences (8; CPU: 1)", to_positive),
        Flag("decode_blocks_padding", "granularity of block tables (128; CPU: 8)", to_positive),
        Flag(
            "max_decode_seqs", "most sequences decoded at once (256; CPU: 32)", to_positive,
            aliases=("max_running_seqs",),
        ),
        switch(
            "enable_prefix_cache_hbm",
            "keep KV for prompts that begin alike, in multiples of prefill_len_padding; layers "
            "with a window keep all of theirs then",
            False,
        ),
        switch(
            "enable_chunked_prefill",
            "compute prompts in chunks: several take turns, the one with the least left first, and "
            "one worker for both roles decodes beside each chunk",
            False,
        ),
        Flag(
            "prefill_chunk_tokens",
            "prompt tokens of one step with --enable_chunked_prefill (512, or one block if that "
            "is more): decoding sequences wait for no more",
            to_positive,
        ),
        Flag(
            "hbm_utilization_factor",
            "share for KV of the memory left after the weights and what a step takes",
            to_share, 0.9,
        ),
        Flag("num_blocks", "KV blocks of a worker (default: by memory; CPU: 1 GiB)", to_positive),
        Flag("block_size", "tokens of a KV block", to_whole, 32, choices=BLOCK_SIZES),
        Flag(
            "max_queued_requests", "waiting requests of a worker before it rejects",
            to_positive, 1024,
        ),
        switch("enable_lora", "serve LoRA adapters", False, (False,)),
        Flag("max_lora_rank", "largest rank of an adapter", to_positive, 16, supported=(16,)),
        switch("enable_lora_cache", "keep adapters in memory", True, (True,)),
        Flag(
            "max_num_mem_cached_lora", "adapters kept in memory", to_positive, 16, supported=(16,)
        ),
    ),
)  # fmt: skip

TRANSFER = Group(
    "KV transfer",
    (
        Flag(
            "kv_transports",
            "how KV may move between workers, best first (device,shm,jax,grpc; CPU: without "
            "jax): device within a process, shm within a machine, jax from devices to devices "
            "between processes, grpc",
            to_transports,
        ),
        Flag(
            "max_exported_fraction",
            "share of a prefill worker's KV blocks that may wait for decode workers, prompts "
            "being computed included; beyond it no more are begun",
            to_share, 0.5,
        ),
    ),
)  # fmt: skip

PROFILING = Group(
    "profiling",
    (
        Flag(
            "jax_profile_dir",
            "on SIGUSR2 each worker writes a trace of its next 5 seconds into a folder here, for "
            "XProf or Perfetto; the server hands the signal on to the workers it has started",
        ),
    ),
)
LIFE = Group(
    "life and death",
    (
        Flag(
            "drain_timeout_s",
            "how long what runs may go on after SIGTERM or Ctrl-C; a second one ends it at once. "
            "The default lies below the 30 s that Kubernetes gives a pod",
            to_seconds, 25.0,
        ),
    ),
)  # fmt: skip

WORKER_LIFE = Group(
    "workers that fail",
    (
        switch(
            "decode_may_prefill",
            "decode workers prefill as well while no prefill worker is left; they compile more",
            False,
        ),
        Flag(
            "step_limit_s", "a worker whose step takes longer hangs and ends",
            to_step_limit, 300.0,
        ),
    ),
)  # fmt: skip

ROUTING = Group(
    "routing",
    (
        Flag(
            "worker_wait_s",
            "how long a request waits for a worker to come back when none of a role is left, "
            "before it is answered by 503; 0 does not wait",
            to_seconds, 30.0,
        ),
        Flag(
            "max_lost_attempts",
            "a request fails, by 500, when so many of its attempts in a row were lost with their "
            "workers: it may be what kills them. Wanted higher where workers often die",
            to_positive, 5,
        ),
    ),
)  # fmt: skip

TOPOLOGY = Group(
    "topology",
    (
        Flag("disagg_topo", "P,D: prefill and decode workers; without it one worker does both"),
        Flag("data_parallel_size", "how many there are of each of these workers", to_positive, 1),
    ),
)

DEPLOYMENT = Group(
    "deployment",
    (
        Flag("num_hosts", "hosts of the deployment", to_positive, 1, supported=(1,)),
        Flag(
            "worker_distributed_method",
            "mp (a process per worker), thread (all workers in one process, each with its own "
            "devices) or ray; unset it is thread on a TPU host with --disagg_topo, else mp",
            choices=("mp", "thread", "ray"), supported=(None, "mp", "thread"),
        ),
        Flag(
            "restart_wait_s",
            "how long a worker that has died waits to be started again; doubles with each death, "
            "up to 30",
            to_seconds, 1.0,
        ),
        Flag(
            "start_limit_s",
            "a worker that is not ready is killed, and started again, when for so long it has "
            "logged nothing and used no processor; 0 waits for ever",
            to_seconds, 600.0,
        ),
    ),
)  # fmt: skip

DEMO = Group("demo", (switch("once", "end after the answer", False),))

LOGGING = Group(
    "logging",
    (Flag("log_level", "DEBUG, INFO, WARNING or ERROR (HEX_LLM_LOG_LEVEL)", to_level),),
)

WORKER = Group(
    "worker",
    (
        Flag("address", "unix:/path or host:port to serve the router and other workers at"),
        Flag("advertise", "host:port at which other workers reach this one (default: --address)"),
        Flag("cpus", "cores to run on, such as 0,1", to_cpus),
        switch("exit_with_stdin", "end when standard input closes", False),
    ),
)

ROUTER = Group(
    "router",
    (Flag("workers", "addresses of the workers, such as unix:/a,host:8471", to_addresses),),
)
