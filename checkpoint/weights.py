"""Reads safetensors weights, in one file or in shards, without copying them.

A safetensors file is an 8-byte little-endian header length, a JSON header that gives each
tensor's dtype, shape and byte range, and then the bytes. The files are mapped, so a tensor
costs nothing until it is touched, and threads may read different tensors at once.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoint.errors import CheckpointError
from checkpoint.json_file import parse_object, read_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""safetensors' dtype names and what they are in NumPy."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes it takes, in the file and in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


class _File:
    """One safetensors file: mapped for a look into it, and open for reading it through."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self.size = os.fstat(self.descriptor).st_size

    @functools.cached_property
    def mapped(self) -> mmap.mmap:
        return mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies: in `file`, from byte `begin` on."""

    info: TensorInfo
    file: _File
    begin: int


class WeightFiles:
    """All tensors of a model folder; made by `open_weights`. Immutable and thread-safe."""

    def __init__(self, stored: dict[str, _Stored]) -> None:
        self._stored = stored

    @property
    def names(self) -> dict[str, TensorInfo]:
        """Every tensor's name, with its shape and dtype."""
        return {name: tensor.info for name, tensor in self._stored.items()}

    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError: there is no such tensor."""
        return self._find(name).info

    def path(self, name: str) -> Path:
        """The file that holds tensor `name`. Raises CheckpointError: there is no such tensor."""
        return self._find(name).file.path

    def read(self, name: str) -> np.ndarray:
        """Returns tensor `name` as a read-only view of the mapped file.

        The view stays valid as long as it is referenced, and its bytes are read from disk
        when first touched. It need not be aligned to its dtype.

        Raises:
            CheckpointError: there is no such tensor.
        """
        tensor = self._find(name)
        if tensor.info.nbytes == 0:
            return np.empty(tensor.info.shape, tensor.info.dtype)
        flat = np.frombuffer(
            tensor.file.mapped,
            dtype=tensor.info.dtype,
            count=math.prod(tensor.info.shape),
            offset=tensor.begin,
        )
        return flat.reshape(tensor.info.shape)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (of bytes) with those of tensor `name` from its byte `offset` on.

        Reads the file itself: in large pieces that is several times as fast as touching mapped
        pages, above all on network storage, and leaves no pages with this process.

        Raises:
            CheckpointError: there is no such tensor, or the file has become shorter.
        """
        tensor = self._find(name)
        file, at = tensor.file, tensor.begin + offset
        while buffer:
            try:
                count = os.preadv(file.descriptor, [buffer], at)
            except OSError as error:
                raise CheckpointError(f"{file.path}: cannot be read ({error.strerror})") from error
            if not count:
                raise CheckpointError(f"{file.path}: cut off at byte {at}, while it was read")
            buffer, at = buffer[count:], at + count

    def _find(self, name: str) -> _Stored:
        tensor = self._stored.get(name)
        if tensor is None:
            raise CheckpointError(f"the weights have no tensor named {name!r}")
        return tensor


def open_weights(folder: Path) -> WeightFiles:
    """Maps the safetensors files of a model folder and checks their headers.

    `model.safetensors` is taken where it exists, else the shards that
    `model.safetensors.index.json` lists.

    Raises:
        CheckpointError: no safetensors in the folder; a shard is missing; a file is cut off
            or its header is wrong; the index and the shards disagree; a tensor exists twice.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if (folder / SINGLE_FILE).is_file():
        return WeightFiles(_open_file(folder / SINGLE_FILE))
    if (folder / INDEX_FILE).is_file():
        return WeightFiles(_open_shards(folder))
    raise CheckpointError(no_safetensors(str(folder), [path.name for path in folder.iterdir()]))


def no_safetensors(where: str, names: Iterable[str]) -> str:
    """What to say where neither SINGLE_FILE nor INDEX_FILE is among the files `names`."""
    found = sorted(name for name in names if name.endswith(_WEIGHTS))
    hint = ""
    if any(not name.endswith(".safetensors") for name in found):
        hint = (
            "; weights are read from safetensors alone (pickled ones can run code): convert the "
            "model, or take a revision that has them"
        )
    elif found:
        hint = "; shards need their index file"
    listing = f" (it has {', '.join(found[:4])}{', …' if len(found) > 4 else ''})" if found else ""
    return f"{where}: no safetensors: neither {SINGLE_FILE} nor {INDEX_FILE}{listing}{hint}"


def _open_shards(folder: Path) -> dict[str, _Stored]:
    index_path = folder / INDEX_FILE
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: 'weight_map' must be an object with entries")
    shard_of: dict[str, str] = {}
    for name, shard in weight_map.items():
        # A plain name only: an index must not reach outside its folder.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index_path}: {name!r} has a bad file name {shard!r}")
        shard_of[name] = shard

    stored: dict[str, _Stored] = {}
    home: dict[str, str] = {}
    for shard in sorted(set(shard_of.values())):
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder / shard}: the shard is missing, {INDEX_FILE} lists it")
        for name, tensor in _open_file(folder / shard).items():
            if name in stored:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is in both {home[name]} and {shard}"
                )
            stored[name] = tensor
            home[name] = shard
    for name, shard in shard_of.items():
        if home.get(name) != shard:
            raise CheckpointError(f"{index_path}: tensor {name!r} is not in {shard}")
    return stored


def _open_file(path: Path) -> dict[str, _Stored]:
    try:
        file = _File(path)
        size = file.size
        if size < 8:
            raise CheckpointError(f"{path}: {size} bytes, too short for a safetensors file")
        header_size = int.from_bytes(os.pread(file.descriptor, 8, 0), "little")
        if header_size > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: not a safetensors file, or cut off: its header should take "
                f"{header_size} bytes and the file has {size}"
            )
        header = parse_object(os.pread(file.descriptor, header_size, 8), f"{path} (header)")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error

    header.pop("__metadata__", None)
    start = 8 + header_size
    spans: list[tuple[int, int, str]] = []
    stored: dict[str, _Stored] = {}
    for name, entry in header.items():
        info, begin, end = _parse_entry(entry, f"{path}: tensor {name!r}")
        spans.append((begin, end, name))
        stored[name] = _Stored(info, file, start + begin)

    # The format allows no holes and no overlaps, so sorted spans must follow each other.
    expected = 0
    for begin, end, name in sorted(spans):
        if begin != expected:
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at byte {begin}, expected {expected}"
            )
        expected = end
    if start + expected != size:
        raise CheckpointError(
            f"{path}: the header describes {start + expected} bytes but the file has {size}; "
            f"it is {'cut off or half written' if size < start + expected else 'too long'}"
        )
    return stored


def _parse_entry(entry: Any, where: str) -> tuple[TensorInfo, int, int]:
    """Returns what a header entry says, with the tensor's byte range [begin, end)."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} has a bad header entry {entry!r}")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if dtype is None:
        raise CheckpointError(f"{where} has an unsupported dtype {entry.get('dtype')!r}")
    shape = _counts(entry.get("shape"), f"{where} has a bad shape")
    offsets = _counts(entry.get("data_offsets"), f"{where} has bad data_offsets")
    if len(offsets) != 2:
        raise CheckpointError(f"{where} has bad data_offsets {list(offsets)}")
    info = TensorInfo(shape, dtype)
    if offsets[1] - offsets[0] != info.nbytes:
        raise CheckpointError(
            f"{where} has {offsets[1] - offsets[0]} bytes, "
            f"but shape {list(shape)} of {entry['dtype']} takes {info.nbytes}"
        )
    return info, offsets[0], offsets[1]


def _counts(value: Any, complaint: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise CheckpointError(f"{complaint} {value!r}")
    return tuple(value)
