"""From command line and environment to the frozen configurations."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from settings import flags, http_flags, model_flags
from settings.api_keys import read_admin_keys, read_api_keys
from settings.batching import check_batching
from settings.config import (
    ChatConfig,
    EngineConfig,
    HttpConfig,
    LifeConfig,
    ModelConfig,
    RouterConfig,
    ServeConfig,
    Topology,
    WorkerConfig,
)
from settings.environment import Environment
from settings.errors import ConfigError
from settings.flag_parser import parse, spell

SHARED = (
    model_flags.MODEL, model_flags.WEIGHTS, flags.ENGINE, flags.TRANSFER, flags.PROFILING,
    flags.LIFE, flags.WORKER_LIFE,
)  # fmt: skip
"""The groups that a launcher hands on to its workers."""
_SERVE = (
    *SHARED, flags.ROUTING, model_flags.API, flags.TOPOLOGY, flags.DEPLOYMENT, http_flags.HTTP,
    flags.LOGGING,
)  # fmt: skip
_ROUTER = (
    model_flags.MODEL, model_flags.API, flags.ROUTER, flags.ROUTING, flags.LIFE, http_flags.HTTP,
    flags.LOGGING,
)  # fmt: skip
LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DEMO = ("--model=demo", "--disagg_topo=1,1", "--port=0")


def serve_config(
    arguments: Sequence[str], environment: Environment, *, as_hex_llm: bool = False
) -> tuple[ServeConfig, list[str]]:
    """`hexserve serve`: the deployment, and the flags to hand on to each worker.

    Raises:
        ConfigError: see settings.flag_parser.parse; or no model is named.
    """
    values = parse(
        _SERVE,
        arguments,
        prog="python -m hex_llm.server.api_server" if as_hex_llm else "hexserve serve",
        description="Serve a model over HTTP, by one worker or by pools of them.",
    )
    return _deployment(values, environment, as_hex_llm=as_hex_llm)


def demo_config(
    arguments: Sequence[str], environment: Environment
) -> tuple[ServeConfig, list[str], bool]:
    """`hexserve demo`: as `serve_config`, and whether to end after the answer.

    Raises:
        ConfigError: see settings.flag_parser.parse.
    """
    values = parse(
        (flags.DEMO, *_SERVE),
        [*_DEMO, *arguments],
        prog="hexserve demo",
        description="Serve the demo model by a prefill and a decode worker at a free port, ask "
        "it a question, and go on serving.",
        usage="[FLAGS]",
    )
    return *_deployment(values, environment, as_hex_llm=False), values.once


def _deployment(
    values: argparse.Namespace, environment: Environment, *, as_hex_llm: bool
) -> tuple[ServeConfig, list[str]]:
    model = _model(values, environment)
    config = ServeConfig(
        model=model,
        engine=_engine(values),
        http=_http(values, environment, as_hex_llm=as_hex_llm),
        topology=_topology(values),
        data_parallel_size=values.data_parallel_size,
        worker_distributed_method=values.worker_distributed_method,
        kv_transports=values.kv_transports,
        life=_life(values),
        log_level=_log_level(values, environment),
        cache=environment.cache,
        jax_profile_dir=_folder(values.jax_profile_dir),
        jax_platforms=environment.jax_platforms,
        visible_devices=environment.visible_devices,
    )
    values.model = model.model
    return config, spell(values, SHARED)


def worker_config(arguments: Sequence[str], environment: Environment, prog: str) -> WorkerConfig:
    """`python -m prefill_worker` and its likes.

    Raises:
        ConfigError: see settings.flag_parser.parse; or no address is given.
    """
    values = parse(
        (*SHARED, flags.WORKER, flags.LOGGING),
        arguments,
        prog=prog,
        description="Run one worker, for routers to connect to.",
    )
    if values.address is None:
        raise ConfigError("--address is missing: unix:/path or host:port to listen at")
    return _worker(values, environment)


def threads_config(
    arguments: Sequence[str], environment: Environment, prog: str
) -> tuple[WorkerConfig, Topology | None, int]:
    """`python -m deploy.threads`: what its workers have in common, which, and how many of each.

    The address is unix: and the folder of their sockets.

    Raises:
        ConfigError: see settings.flag_parser.parse; or the address is no folder's.
    """
    values = parse(
        (*SHARED, flags.TOPOLOGY, flags.WORKER, flags.LOGGING),
        arguments,
        prog=prog,
        description="Run all workers of a topology in one process, for a router to connect to.",
    )
    if values.address is None or not values.address.startswith("unix:/"):
        raise ConfigError(f"--address={values.address}: unix:/folder is wanted, for the sockets")
    return _worker(values, environment), _topology(values), values.data_parallel_size


def _topology(values: argparse.Namespace) -> Topology | None:
    return None if values.disagg_topo is None else Topology.parse(values.disagg_topo)


def _worker(values: argparse.Namespace, environment: Environment) -> WorkerConfig:
    return WorkerConfig(
        model=_model(values, environment),
        engine=_engine(values),
        address=values.address,
        advertise=values.advertise,
        cpus=values.cpus,
        exit_with_stdin=values.exit_with_stdin,
        kv_transports=values.kv_transports,
        life=_life(values),
        log_level=_log_level(values, environment),
        cache=environment.cache,
        jax_profile_dir=_folder(values.jax_profile_dir),
    )


def router_config(arguments: Sequence[str], environment: Environment) -> RouterConfig:
    """`python -m router`.

    Raises:
        ConfigError: see settings.flag_parser.parse; or no worker is named.
    """
    values = parse(
        _ROUTER,
        arguments,
        prog="python -m router",
        description="Serve HTTP by way of workers that run elsewhere.",
    )
    if not values.workers:
        raise ConfigError("--workers is missing: addresses of the workers, separated by commas")
    return RouterConfig(
        model=_model(values, environment),
        http=_http(values, environment, as_hex_llm=False),
        workers=values.workers,
        life=_life(values),
        log_level=_log_level(values, environment),
        cache=environment.cache,
    )


def _model(values: argparse.Namespace, environment: Environment) -> ModelConfig:
    model = values.model or environment.storage_uri
    if not model:
        raise ConfigError("--model is missing: a Hugging Face model id, a local folder, or demo")
    # A router's command line has no flags for the weights, a worker's none for the API.
    names = ModelConfig.__dataclass_fields__.keys() & vars(values).keys()
    return ModelConfig(**{name: getattr(values, name) for name in names} | {"model": model})


def _folder(text: str | None) -> Path | None:
    return None if text is None else Path(text).absolute()


def _engine(values: argparse.Namespace) -> EngineConfig:
    names = EngineConfig.__dataclass_fields__
    return check_batching(EngineConfig(**{name: getattr(values, name) for name in names}))


def _life(values: argparse.Namespace) -> LifeConfig:
    # A router's command line has no limit for steps, a worker's none for waiting.
    names = LifeConfig.__dataclass_fields__.keys() & vars(values).keys()
    return LifeConfig(**{name: getattr(values, name) for name in names})


def _http(values: argparse.Namespace, environment: Environment, *, as_hex_llm: bool) -> HttpConfig:
    everywhere = environment.on_vertex or as_hex_llm
    vertex_port = environment.http_port or (8080 if environment.on_vertex else 7080)
    if values.ssl_keyfile is not None and values.ssl_certfile is None:
        raise ConfigError(f"--ssl_keyfile={values.ssl_keyfile}: --ssl_certfile is missing")
    host = values.host or ("0.0.0.0" if everywhere else "127.0.0.1")
    api_keys = read_api_keys(values.api_key, values.api_key_file, environment.api_key)
    admin_keys = read_admin_keys(
        values.admin_key, values.admin_key_file, environment.admin_key, api_keys
    )
    if values.admin and not admin_keys and host not in LOOPBACK:
        raise ConfigError(f"--admin with --host={host}: anybody could use it without --admin_key")
    if values.admin and not admin_keys and api_keys:
        raise ConfigError("--admin with API keys: it wants a key of its own, by --admin_key")
    return HttpConfig(
        host=host,
        port=vertex_port if values.port is None else values.port,
        predict_route=environment.predict_route,
        health_route=environment.health_route,
        api_keys=api_keys,
        allowed_origins=values.allowed_origins or (),
        ssl_certfile=values.ssl_certfile,
        ssl_keyfile=values.ssl_keyfile,
        max_concurrent_requests=values.max_concurrent_requests,
        max_body_bytes=values.max_body_bytes,
        admin=values.admin,
        admin_keys=admin_keys,
    )


def chat_config(arguments: Sequence[str], environment: Environment) -> ChatConfig:
    """`hexserve chat`.

    Raises:
        ConfigError: see settings.flag_parser.parse; or the URL is none.
    """
    values = parse(
        (http_flags.CHAT,),
        arguments,
        prog="hexserve chat",
        description="Talk with a model that a server serves.",
        usage="[FLAGS]",
    )
    if not values.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url={values.url}: a URL begins with http:// or https://")
    keys = read_api_keys(values.api_key, None, environment.api_key)
    return ChatConfig(
        url=values.url.rstrip("/").removesuffix("/v1"),
        model=values.model,
        system=values.system,
        max_tokens=values.max_tokens,
        temperature=values.temperature,
        api_key=keys[0] if keys else None,
    )


def _log_level(values: argparse.Namespace, environment: Environment) -> str:
    if values.log_level is not None:
        level: str = values.log_level
        return level
    return "DEBUG" if environment.verbose else environment.log_level
