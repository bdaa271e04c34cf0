"""Where a source can be reached: one URI per transport, best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SCHEMES = ("shm", "grpc+unix", "grpc")
"""The transports this end speaks, best first."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`target` is a socket's absolute path (shm, grpc+unix) or host:port (grpc)."""

    scheme: str
    target: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.target}"


def parse_endpoint(uri: str) -> Endpoint:
    """Raises ValueError if `uri` is none of shm:///path, grpc+unix:///path, grpc://host:port."""
    scheme, separator, target = uri.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(f"{uri!r}: the scheme must be one of {', '.join(_SCHEMES)}")
    if scheme == "grpc":
        host, _, port = target.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{uri!r}: expected grpc://host:port")
    elif not target.startswith("/"):
        raise ValueError(f"{uri!r}: expected an absolute path, {scheme}:///path")
    return Endpoint(scheme, target)


def ranked(uris: Sequence[str]) -> list[Endpoint]:
    """The endpoints this end can use, best first.

    Other schemes are skipped: a source may offer more than its reader knows. Raises
    ValueError for a known scheme with a bad address.
    """
    usable = [parse_endpoint(uri) for uri in uris if uri.partition("://")[0] in _SCHEMES]
    return sorted(usable, key=lambda endpoint: _SCHEMES.index(endpoint.scheme))
