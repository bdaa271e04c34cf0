"""How fast a checkpoint is loaded, and how much memory that takes beside the weights.

    python -m benchmarks.load [--gib 1] [--folder DIR] [--json FILE] [--check]

Writes a checkpoint of random bfloat16 weights in shards, reads it by one thread and by several,
from disk and from the page cache, and loads it for the engine in processes of their own. With
--check, exit status 1 when a load takes more than the largest tensor above the weights, or when
several threads read much slower than one.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from benchmarks.report import print_line
from benchmarks.stats import host_info
from checkpoint.tensor_reader import READ_THREADS, TensorReader
from checkpoint.weights import INDEX_FILE, open_weights
from settings.config import GIB

MIB = 2**20
SLACK_BYTES = 32 * MIB
"""What threads, the allocator and jax take beside, whatever the model's size."""
SHARDS = 3
ROUNDS = 3
_NOISE = 0.8
"""Where pages are slow to be touched first, or the cores few, several threads gain nothing."""
_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_SMALL = {"vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1408}
"""In place of _CONFIG's below _SMALL_GIB, whose embeddings would be the model."""
_SMALL_GIB = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = _parse(argv)
    if args.measure:
        print(json.dumps(_measure_load(args.measure, args.dtype)))
        return 0
    console, status = Console(), Console(stderr=True)
    with _folder(args.folder) as folder:
        print_line(status, f"writing {args.gib:g} GiB to {folder}")
        size = write_checkpoint(folder, args.gib)
        reads = {
            f"{state}, {threads} threads" if threads > 1 else f"{state}, 1 thread": [
                _read_rate(folder, threads, cold=state == "disk") for _ in range(args.rounds)
            ]
            for state in ("disk", "page cache")
            for threads in (1, READ_THREADS)
        }
        loads = {dtype: _in_own_process(folder, dtype) for dtype in ("bfloat16", "float32")}
    table = Table("read from", "GiB/s, best", "all")
    for name, rates in reads.items():
        table.add_row(name, f"{max(rates):.2f}", ", ".join(f"{rate:.2f}" for rate in rates))
    console.print(table)
    table = Table("loaded as", "seconds", "GiB/s", "weights MiB", "most above them MiB", "allowed")
    for dtype, load in loads.items():
        table.add_row(
            dtype, f"{load['seconds']:.1f}", f"{size / GIB / load['seconds']:.2f}",
            *(f"{load[name] / MIB:.0f}" for name in ("weights", "above", "allowed")),
        )  # fmt: skip
    console.print(table)
    if args.json:
        figures = {"host": host_info(), "bytes": size, "read_gib_s": reads, "loads": loads}
        args.json.write_text(json.dumps(figures, indent=2))
    missed = _missed(reads, loads)
    for line in missed:
        print_line(status, f"missed: {line}", style="red")
    return 1 if args.check and missed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.load", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="reads of each kind")
    parser.add_argument("--folder", type=Path, help="where to write it, and leave it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="bfloat16", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="hexserve-load-") as folder:
        yield Path(folder)


def write_checkpoint(folder: Path, gib: float) -> int:
    """Write a Llama checkpoint of about `gib` in shards; returns the bytes of its tensors."""
    from engine.models.families import traits_of
    from engine.models.weights import stored_parts

    config = _CONFIG | (_SMALL if gib < _SMALL_GIB else {})

    def shapes_of(layers: int) -> dict[str, tuple[int, ...]]:
        traits = traits_of(config | {"num_hidden_layers": layers})
        return {part.tensor: part.shape for part in stored_parts(traits).values()}

    one, two = (2 * sum(map(math.prod, shapes_of(layers).values())) for layers in (1, 2))
    layers = 1 + max(0, round((gib * GIB - one) / (two - one)))
    shapes = shapes_of(layers)
    config |= {"num_hidden_layers": layers}
    noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32) * np.float32(0.02)
    bits = noise.astype(ml_dtypes.bfloat16)
    names, total = sorted(shapes), 0
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {name: np.resize(bits, shapes[name]) for name in names[shard::SHARDS]}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def _read_rate(folder: Path, threads: int, *, cold: bool) -> float:
    """GiB per second, checked for NaN."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            if cold:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(8 * MIB):
                    pass
    files = open_weights(folder)
    began = time.perf_counter()
    with TensorReader(files, threads=threads) as reader:
        for name in files.names:
            reader.read(name)
    size = sum(info.nbytes for info in files.names.values())
    return size / GIB / (time.perf_counter() - began)


def _in_own_process(folder: Path, dtype: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.load", f"--measure={folder}", f"--dtype={dtype}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _measure_load(folder: Path, dtype: str) -> dict[str, float]:
    """Load in this process; sizes in bytes, `above` beside the weights at the worst moment."""
    import jax

    from engine.kernels.choose import choose_kernels
    from engine.loading import load_params
    from engine.models.families import traits_of
    from engine.placing import plan_placement
    from engine.sharding import make_mesh

    config = json.loads((folder / "config.json").read_text())
    kernels = choose_kernels("cpu", "auto")
    mesh = make_mesh(jax.devices("cpu")[:1])
    wanted = np.dtype(dtype)
    placement = plan_placement(traits_of(config), kernels, mesh, wanted)
    jax.block_until_ready(jax.numpy.zeros(8))  # what jax takes once is not the load's
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    began = time.perf_counter()
    params = load_params(folder, placement, wanted, config["max_position_embeddings"])
    seconds = time.perf_counter() - began
    weights = sum(array.nbytes for array in jax.tree.leaves(params))
    infos = open_weights(folder).names.values()
    largest = max(info.nbytes // info.dtype.itemsize for info in infos) * wanted.itemsize
    return {
        "seconds": seconds,
        "weights": weights,
        "above": _status("VmHWM") - before - weights,
        "allowed": largest + SLACK_BYTES,
    }


def _status(field: str) -> int:
    """A size of this process, in bytes; Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def _missed(reads: dict[str, list[float]], loads: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    one, several = (max(rates) for name, rates in reads.items() if name.startswith("page cache"))
    if several < _NOISE * one:
        lines.append(f"{READ_THREADS} threads read at {several:.2f} GiB/s, one at {one:.2f}")
    for dtype, load in loads.items():
        if load["above"] > load["allowed"]:
            lines.append(
                f"as {dtype}: {load['above'] / MIB:.0f} MiB above the weights, "
                f"{load['allowed'] / MIB:.0f} are allowed"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
