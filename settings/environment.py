"""The only place that reads or sets environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from settings.errors import ConfigError

VISIBLE_DEVICES = {"tpu": "TPU_VISIBLE_CHIPS", "gpu": "CUDA_VISIBLE_DEVICES"}
"""Kind of accelerator → the variable that says which of them a process may use."""
API_KEY = "HEXSERVE_API_KEY"
ADMIN_KEY = "HEXSERVE_ADMIN_KEY"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True)
class Environment:
    """What the process environment says.

    Attributes:
        on_vertex: an `AIP_*` variable is set.
        storage_uri: the model when `--model` is absent.
        api_key, admin_key: those of API_KEY and ADMIN_KEY, keys separated by commas.
        jax_platforms: JAX_PLATFORMS, "" when it leaves the choice to jax.
        visible_devices: kind ("tpu", "gpu") → the devices that its variable allows; a kind
            that is not there is not restricted.
    """

    cache: Path
    log_level: str
    verbose: bool
    on_vertex: bool
    http_port: int | None
    health_route: str
    predict_route: str
    storage_uri: str | None
    api_key: str | None = field(repr=False)
    admin_key: str | None = field(repr=False)
    jax_platforms: str
    visible_devices: Mapping[str, tuple[str, ...]]


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read `variables`, the process environment by default.

    Raises:
        ConfigError: a variable has a value that cannot be used; names it.
    """
    env = os.environ if variables is None else variables
    cache = Path(env.get("HEXSERVE_CACHE") or Path.home() / ".cache" / "hexserve")
    level = env.get("HEX_LLM_LOG_LEVEL", "INFO").upper()
    if level not in LOG_LEVELS:
        raise ConfigError(f"HEX_LLM_LOG_LEVEL={level}: one of {', '.join(LOG_LEVELS)} is wanted")
    verbose = env.get("HEX_LLM_VERBOSE_LOG", "false").lower()
    if verbose not in ("true", "false"):
        raise ConfigError(f"HEX_LLM_VERBOSE_LOG={verbose}: true or false is wanted")
    vertex = {name: value for name, value in env.items() if name.startswith("AIP_")}
    return Environment(
        cache=cache.expanduser().absolute(),
        log_level=level,
        verbose=verbose == "true",
        on_vertex=bool(vertex),
        http_port=_port(vertex.get("AIP_HTTP_PORT")),
        health_route=_route(vertex, "AIP_HEALTH_ROUTE", "/ping"),
        predict_route=_route(vertex, "AIP_PREDICT_ROUTE", "/generate"),
        storage_uri=vertex.get("AIP_STORAGE_URI") or None,
        api_key=env.get(API_KEY) or None,
        admin_key=env.get(ADMIN_KEY) or None,
        jax_platforms=env.get("JAX_PLATFORMS", ""),
        visible_devices={
            kind: _devices(env[name]) for kind, name in VISIBLE_DEVICES.items() if name in env
        },
    )


def child_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `additions`, for a process that it starts.

    Without the keys: only the process that answers HTTP has a use for them.
    """
    env = {name: value for name, value in os.environ.items() if name not in (API_KEY, ADMIN_KEY)}
    return {**env, **additions}


def quiet_grpc() -> None:
    """Keep gRPC's notes on connections that end off standard error.

    A GRPC_VERBOSITY that is set wins. To be called before grpc is imported; processes that
    this one starts inherit it.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _devices(text: str) -> tuple[str, ...]:
    """The names in a list; -1, a common way to say "none", is no name."""
    parts = (part.strip() for part in text.split(","))
    return tuple(part for part in parts if part and not part.startswith("-"))


def _port(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"AIP_HTTP_PORT={text}: a port from 1 to 65535 is wanted")
    return int(text)


def _route(vertex: Mapping[str, str], name: str, default: str) -> str:
    route = vertex.get(name) or default
    if not route.startswith("/"):
        raise ConfigError(f"{name}={route}: a route begins with /")
    return route
