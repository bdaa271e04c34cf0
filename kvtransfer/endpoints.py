"""Where a source can be reached: one URI per transport, and which of them a reader takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SCHEMES = {
    "device": ("device",),
    "shm": ("shm",),
    "jax": ("jax+unix", "jax"),
    "grpc": ("grpc+unix", "grpc"),
}
"""Transport → the schemes of its addresses, best first."""

TRANSPORTS = tuple(_SCHEMES)
"""The transports by name, best first."""

_KNOWN = tuple(scheme for schemes in _SCHEMES.values() for scheme in schemes)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`target` is process/name (device), a socket's absolute path (shm, grpc+unix, jax+unix) or
    host:port (grpc, jax)."""

    scheme: str
    target: str

    @property
    def transport(self) -> str:
        return self.scheme.partition("+")[0]

    def __str__(self) -> str:
        return f"{self.scheme}://{self.target}"


def parse_endpoint(uri: str) -> Endpoint:
    """Raises ValueError if `uri` is none of device://process/name, shm:///path,
    grpc+unix:///path, grpc://host:port, jax+unix:///path, jax://host:port."""
    scheme, separator, target = uri.partition("://")
    if not separator or scheme not in _KNOWN:
        raise ValueError(f"{uri!r}: the scheme must be one of {', '.join(_KNOWN)}")
    if scheme == "device":
        process, _, name = target.partition("/")
        if not process or not name:
            raise ValueError(f"{uri!r}: expected device://process/name")
    elif scheme in ("grpc", "jax"):
        host, _, port = target.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{uri!r}: expected {scheme}://host:port")
    elif not target.startswith("/"):
        raise ValueError(f"{uri!r}: expected an absolute path, {scheme}:///path")
    return Endpoint(scheme, target)


def ranked(uris: Sequence[str], transports: Sequence[str] = TRANSPORTS) -> list[Endpoint]:
    """The endpoints that a reader with these `transports` can use, in their order.

    Other schemes are skipped: a source may offer more than its reader knows. Raises
    ValueError for a known scheme with a bad address.
    """
    order = [scheme for transport in transports for scheme in _SCHEMES[transport]]
    usable = [parse_endpoint(uri) for uri in uris if uri.partition("://")[0] in order]
    return sorted(usable, key=lambda endpoint: order.index(endpoint.scheme))
