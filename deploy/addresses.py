"""Where a worker listens, and what it tells others of that."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtransfer import TRANSPORTS, device_uri
from settings.errors import ConfigError

MAX_SOCKET_PATH = 107  # bytes that fit sun_path beside its terminating zero


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """`grpc` is the target to listen at; `sources` where its KV can be fetched, best first.

    `shm_path` and `device_name` are None where its KV is not served so. `host` is what other
    workers reach this one's machine by.
    """

    grpc: str
    shm_path: Path | None
    sources: tuple[str, ...]
    device_name: str | None = None
    host: str = "127.0.0.1"


def parse_address(
    address: str,
    advertise: str | None,
    transports: Sequence[str] = TRANSPORTS,
    device_name: str | None = None,
) -> WorkerAddress:
    """From `--address`, `--advertise` and `--kv_transports`.

    A Unix socket's folder must be the user's alone: whoever can connect is obeyed. Over TCP
    the advertised host:port is what other machines reach. `device_name` is given to a worker
    whose process holds other workers too.

    Raises:
        ConfigError: neither unix:/path nor host:port, the folder is open to others, or none of
            `transports` can be had at such an address.
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
        uris = {
            "shm": f"shm://{shm_path}", "jax": f"jax+unix://{path}", "grpc": f"grpc+unix://{path}"
        }  # fmt: skip
        if device_name is not None:
            uris["device"] = device_uri(device_name)
        sources = _offered(uris, transports, address)
        return WorkerAddress(
            f"unix:{path}",
            shm_path if uris["shm"] in sources else None,
            sources,
            device_name if "device" in transports else None,
        )
    host, port = _split(address, "--address")
    seen_host, seen_port = _split(advertise, "--advertise") if advertise else (host, port)
    if seen_host in ("0.0.0.0", "[::]"):
        raise ConfigError(
            f"--address={address}: other workers cannot reach {seen_host}; give --advertise"
        )
    uris = {name: f"{name}://{seen_host}:{seen_port}" for name in ("jax", "grpc")}
    sources = _offered(uris, transports, address)
    return WorkerAddress(f"{host}:{port}", None, sources, host=seen_host)


def _offered(uris: dict[str, str], transports: Sequence[str], address: str) -> tuple[str, ...]:
    sources = tuple(uris[name] for name in transports if name in uris)
    if not sources:
        raise ConfigError(
            f"--kv_transports={','.join(transports)}: a worker at {address} has only "
            f"{', '.join(uris)}"
        )
    return sources


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
