"""The table of flags; those of the model are in settings/model_flags.py, of HTTP in http_flags.py.

Names may be written with - or _ on the command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from settings.config import BLOCK_SIZES
from settings.errors import ConfigError
from settings.flag_values import (
    to_addresses,
    to_cpus,
    to_keys,
    to_level,
    to_names,
    to_port,
    to_positive,
    to_seconds,
    to_seed,
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
        switch("enable_prefix_cache_hbm", "keep KV of prompts for reuse", False, (False,)),
        switch("enable_chunked_prefill", "prefill in pieces beside decoding", False, (False,)),
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
    ),
)  # fmt: skip

TOPOLOGY = Group(
    "topology",
    (Flag("disagg_topo", "P,D: prefill and decode workers; without it one worker does both"),),
)

DEPLOYMENT = Group(
    "deployment",
    (
        Flag("num_hosts", "hosts of the deployment", to_positive, 1, supported=(1,)),
        Flag("data_parallel_size", "replicas of every worker", to_positive, 1, supported=(1,)),
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


_METAVARS: dict[Callable[[str], Any] | None, str] = {
    to_whole: "N",
    to_positive: "N",
    to_seed: "N",
    to_port: "PORT",
    to_share: "X",
    to_seconds: "S",
    to_step_limit: "S",
    to_cpus: "N,…",
    to_level: "LEVEL",
    to_addresses: "ADDRESS,…",
    to_keys: "KEY,…",
    to_names: "NAME,…",
    to_transports: "NAME,…",
}


def _add(parser: argparse._ArgumentGroup, flag: Flag) -> None:
    help = flag.help
    if flag.default is not None:
        help += f" (default: {_spell(flag.default)})"
    if flag.supported:
        served = " or ".join(_spell(value) for value in flag.supported if value is not None)
        none_yet = flag.supported in ((None,), (False,))
        help += "; not supported yet" if none_yet else f"; only {served} so far"
    if flag.type is None:
        parser.add_argument(f"--{flag.name}", action="store_true", default=flag.default, help=help)
        parser.add_argument(
            f"--no_{flag.name}", dest=flag.name, action="store_false", help=argparse.SUPPRESS
        )
        return
    names = [f"--{name}" for name in (flag.name, *flag.aliases)]
    parser.add_argument(
        *names,
        dest=flag.name,
        type=flag.type,
        default=flag.default,
        choices=flag.choices,
        metavar=None if flag.choices else _METAVARS.get(flag.type, "TEXT"),
        help=help,
    )


def _normalize(arguments: Iterable[str], switches: frozenset[str]) -> list[str]:
    """Spell every flag with _ and a switch's value as its negation or nothing."""
    result = []
    for argument in arguments:
        if not argument.startswith("--"):
            result.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if name in switches and equals:
            if value.lower() not in ("true", "false"):
                raise ConfigError(f"--{name}={value}: true or false is wanted")
            result.append(f"--{name}" if value.lower() == "true" else f"--no_{name}")
        else:
            result.append(f"--{name}{equals}{value}")
    return result


def parse(
    groups: Sequence[Group],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    usage: str = "--model MODEL [FLAGS]",
) -> argparse.Namespace:
    """Parse a command line against some groups of the table; `--help` prints them and exits.

    Raises:
        ConfigError: an unknown flag, a value of the wrong type or out of range, or one whose
            feature is not there yet; the message names the flag.
    """
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {usage}",
        description=description,
        epilog="Names may be written with - or _. A switch is --flag, --no_flag or "
        "--flag=true|false.",
        allow_abbrev=False,
    )
    for group in groups:
        section = parser.add_argument_group(group.title)
        for flag in group.flags:
            _add(section, flag)
    flags = [flag for group in groups for flag in group.flags]
    switches = frozenset(flag.name for flag in flags if flag.type is None)
    values = parser.parse_args(_normalize(arguments, switches))
    for flag in flags:
        value = getattr(values, flag.name)
        if flag.supported and value not in flag.supported:
            served = ", ".join(_spell(v) for v in flag.supported)
            raise ConfigError(
                f"--{flag.name}={_spell(value)} is not supported yet (supported: {served})"
            )
    return values


def spell(values: argparse.Namespace, groups: Iterable[Group]) -> list[str]:
    """The command line that gives `values` again, without what is at its default."""
    result = []
    for flag in (flag for group in groups for flag in group.flags):
        value = getattr(values, flag.name)
        if value == flag.default:
            continue
        if flag.type is None:
            result.append(f"--{flag.name}" if value else f"--no_{flag.name}")
        else:
            result.append(f"--{flag.name}={_spell(value)}")
    return result


def _spell(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value)
    return str(value)
