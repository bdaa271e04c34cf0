"""Where a worker listens, and what it tells others of that."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from settings.errors import ConfigError

MAX_SOCKET_PATH = 107  # bytes that fit sun_path beside its terminating zero


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """`grpc` is the target to listen at; `sources` where its KV can be fetched."""

    grpc: str
    shm_path: Path | None
    sources: tuple[str, ...]


def parse_address(address: str, advertise: str | None) -> WorkerAddress:
    """From `--address` and `--advertise`.

    A Unix socket's folder must be the user's alone: whoever can connect is obeyed. Over TCP
    the advertised host:port is what other machines reach.

    Raises:
        ConfigError: neither unix:/path nor host:port, or the folder is open to others.
    """
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        if not path.is_absolute():
            raise ConfigError(f"--address={address}: unix: wants an absolute path")
        shm_path = path.with_name(f"{path.name}.kv")
        if len(os.fsencode(shm_path)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"--address={address}: the path has more than {MAX_SOCKET_PATH - 3} bytes"
            )
        _check_private(path.parent)
        grpc = f"unix:{path}"
        return WorkerAddress(grpc, shm_path, (f"shm://{shm_path}", f"grpc+unix://{path}"))
    host, port = _split(address, "--address")
    seen_host, seen_port = _split(advertise, "--advertise") if advertise else (host, port)
    if seen_host in ("0.0.0.0", "[::]"):
        raise ConfigError(
            f"--address={address}: other workers cannot reach {seen_host}; give --advertise"
        )
    return WorkerAddress(f"{host}:{port}", None, (f"grpc://{seen_host}:{seen_port}",))


def _split(address: str, flag: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{flag}={address}: unix:/path or host:port is wanted")
    return host, int(port)


def _check_private(folder: Path) -> None:
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        raise ConfigError(f"--address: {folder}: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"--address: {folder} is open to other users (mode {stat.S_IMODE(mode):04o}); "
            "sockets belong in a folder of mode 0700"
        )
