"""The servers that benchmarks.peers compares: how each is started, and when it is ready.

All serve the same weights on the same cores, and each is set as its makers advise for a CPU:

vLLM       bfloat16, its threads bound to the cores, no prefix cache (the prompts share nothing);
           once with its default budget of tokens a step, once with 256, so that long prompts are
           computed in small chunks between the steps of running streams
llama.cpp  a thread for each core, 16 slots of the context that the workloads need; quantized
           weights as they are in the file (repacked, a step of one sequence is as fast, and one
           of 16 took half as long again on AVX-512 cores)
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.logged_process import POLL_S, LoggedProcess, running_command

COLOCATED, INT8, DISAGG = "colocated", "colocated int8", "1,1"
VLLM, VLLM_256 = "vLLM", "vLLM 256"
LLAMA_BF16, LLAMA_Q8 = "llama.cpp bf16", "llama.cpp q8_0"
HEXSERVE = (COLOCATED, INT8, DISAGG)

_START_S = 600.0
_MODEL_LEN = 4096
_SEQUENCES = 16
_SLOT_TOKENS = 2560
"""Of one of llama.cpp's slots: the longest prompt, and its output."""
_TCMALLOC = "*/libtcmalloc_minimal.so.4"
_OPENMP = "lib/libiomp5.so"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started; a port is added to `command`.

    Attributes:
        ready: the path that answers 200 once it is ready.
    """

    command: tuple[str, ...]
    ready: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that has been started."""

    label: str
    url: str
    process: LoggedProcess


def hexserve_servers(model: Path) -> dict[str, ServerCommand]:
    """The placements, in bfloat16, by label."""
    base = (
        *(sys.executable, "-m", "hex_llm.server.api_server", "--host=127.0.0.1"),
        *(f"--model={model}", "--dtype=bfloat16"),
    )
    flags: dict[str, tuple[str, ...]] = {
        COLOCATED: (),
        INT8: ("--quantization=int8",),
        DISAGG: ("--disagg_topo=1,1",),
    }
    return {label: ServerCommand((*base, *flags[label]), "/ping") for label in HEXSERVE}


def vllm_servers(vllm: Path, model: Path) -> dict[str, ServerCommand]:
    """vLLM's two settings, by label. `vllm`: its command, in its own virtual environment."""
    command = (
        *(str(vllm), "serve", str(model), "--host=127.0.0.1", "--dtype=bfloat16"),
        *(f"--max-model-len={_MODEL_LEN}", "--max-num-seqs=32", "--no-enable-prefix-caching"),
    )
    # It spreads its threads over the cores by OpenMP, Intel's of the same environment.
    libraries = (*sorted(Path("/usr/lib").glob(_TCMALLOC))[:1], vllm.parent.parent / _OPENMP)
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "LD_PRELOAD": " ".join(str(path) for path in libraries if path.is_file()),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    chunked = (*command, "--max-num-batched-tokens=256")
    return {
        VLLM: ServerCommand(command, "/health", environment),
        VLLM_256: ServerCommand(chunked, "/health", environment),
    }


def llama_servers(llama: Path, weights: Mapping[str, Path]) -> dict[str, ServerCommand]:
    """llama.cpp's server for the GGUF file of each label."""
    threads = str(len(os.sched_getaffinity(0)))
    command = (
        *(str(llama), "--host", "127.0.0.1", "-t", threads, "-tb", threads),
        *("-np", str(_SEQUENCES), "-c", str(_SEQUENCES * _SLOT_TOKENS)),
    )
    unpacked = {LLAMA_Q8: ("--no-repack",)}
    return {
        label: ServerCommand((*command, "-m", str(path), *unpacked.get(label, ())), "/health")
        for label, path in weights.items()
    }


@contextlib.contextmanager
def running_servers(
    commands: Mapping[str, ServerCommand], folder: Path
) -> Iterator[dict[str, RunningServer]]:
    """All of them, ready, with their output in `folder`; they are ended with the block.

    Raises:
        StartError: one of them does not come up.
    """
    with contextlib.ExitStack() as stack:
        servers = {}
        for index, (label, server) in enumerate(commands.items()):
            port = _free_port()
            process = stack.enter_context(
                running_command(
                    folder / f"{index}.log",
                    label,
                    (*server.command, "--port", str(port)),
                    server.environment,
                )
            )
            servers[label] = RunningServer(label, f"http://127.0.0.1:{port}", process)
        deadline = time.monotonic() + _START_S
        for label, started in servers.items():
            _wait_until_ready(started, commands[label].ready, deadline)
        yield servers


def _wait_until_ready(server: RunningServer, path: str, deadline: float) -> None:
    with httpx.Client(trust_env=False, timeout=_START_S) as http:
        while True:
            server.process.check(deadline)
            with contextlib.suppress(httpx.TransportError):
                if http.get(f"{server.url}{path}").status_code == 200:
                    return
            time.sleep(POLL_S)


def _free_port() -> int:
    """A port that nothing listens at now: peers do not tell the one they take themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
