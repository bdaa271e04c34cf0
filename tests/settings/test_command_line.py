"""Command line and environment together: where to listen, which model, how much to log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from settings.command_line import (
    demo_config,
    router_config,
    serve_config,
    threads_config,
    worker_config,
)
from settings.config import HttpConfig, LifeConfig, ServeConfig, Topology
from settings.environment import read_environment
from settings.errors import ConfigError


def serve(
    *arguments: str, as_hex_llm: bool = False, model: str | None = "m", **variables: str
) -> ServeConfig:
    flags = [*arguments, *([f"--model={model}"] if model is not None else [])]
    return serve_config(flags, read_environment(variables), as_hex_llm=as_hex_llm)[0]


def http(*arguments: str, as_hex_llm: bool = False, **variables: str) -> tuple[str, int]:
    config = serve(*arguments, as_hex_llm=as_hex_llm, **variables).http
    return config.host, config.port


def test_each_process_is_told_of_life_what_concerns_it() -> None:
    drain, wait, limit = "--drain_timeout_s=3", "--worker_wait_s=4", "--step_limit_s=5"
    environment = read_environment({})
    config, worker_flags = serve_config([drain, wait, limit, "--model=m"], environment)
    assert config.life == LifeConfig(drain_timeout_s=3, worker_wait_s=4, step_limit_s=5)
    assert {drain, limit} <= {flag.replace(".0", "") for flag in worker_flags}
    assert not any("worker_wait_s" in flag for flag in worker_flags)
    router = router_config([drain, wait, "--workers=h:1", "--model=m"], environment)
    assert router.life == LifeConfig(drain_timeout_s=3, worker_wait_s=4)
    worker = worker_config([*worker_flags, "--model=m", "--address=h:1"], environment, "w")
    assert worker.life == LifeConfig(drain_timeout_s=3, step_limit_s=5)
    with pytest.raises(ConfigError, match="step_limit_s"):
        router_config([limit, "--workers=h:1", "--model=m"], environment)


@pytest.mark.parametrize(
    ("arguments", "as_hex_llm", "variables", "host", "port"),
    [
        ([], False, {}, "127.0.0.1", 7080),
        ([], True, {}, "0.0.0.0", 7080),
        ([], False, {"AIP_HTTP_PORT": "9000"}, "0.0.0.0", 9000),
        ([], True, {"AIP_HTTP_PORT": "9000"}, "0.0.0.0", 9000),
        ([], False, {"AIP_MODE": "PREDICTION"}, "0.0.0.0", 8080),
        ([], True, {"AIP_MODE": "PREDICTION"}, "0.0.0.0", 8080),
        ([], False, {"AIP_HTTP_PORT": ""}, "0.0.0.0", 8080),
        ([], False, {"AIP_HTTP_PORT": "9000", "AIP_MODE": "x"}, "0.0.0.0", 9000),
        (["--port=1"], False, {}, "127.0.0.1", 1),
        (["--port=1"], True, {}, "0.0.0.0", 1),
        (["--port=1"], False, {"AIP_HTTP_PORT": "9000"}, "0.0.0.0", 1),
        (["--port=0"], False, {"AIP_MODE": "x"}, "0.0.0.0", 0),
        (["--host=::1"], False, {}, "::1", 7080),
        (["--host=127.0.0.1"], True, {}, "127.0.0.1", 7080),
        (["--host=10.0.0.1"], True, {"AIP_HTTP_PORT": "9000"}, "10.0.0.1", 9000),
        (["--host=10.0.0.1", "--port=5"], True, {"AIP_MODE": "x"}, "10.0.0.1", 5),
        ([], False, {"MODEL_ID": "x", "DEPLOY_SOURCE": "y", "PORT": "1"}, "127.0.0.1", 7080),
    ],
)
def test_host_and_port(
    arguments: list[str], as_hex_llm: bool, variables: dict[str, str], host: str, port: int
) -> None:
    assert http(*arguments, as_hex_llm=as_hex_llm, **variables) == (host, port)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "80.5", "²"])
def test_a_bad_port_in_the_environment_is_refused_by_name(port: str) -> None:
    with pytest.raises(ConfigError, match=f"AIP_HTTP_PORT={port}: a port from 1 to 65535"):
        read_environment({"AIP_HTTP_PORT": port})


def test_vertex_names_its_routes() -> None:
    assert serve().http == HttpConfig("127.0.0.1", 7080, "/generate", "/ping")
    config = serve(AIP_PREDICT_ROUTE="/p/q", AIP_HEALTH_ROUTE="/h").http
    assert (config.predict_route, config.health_route) == ("/p/q", "/h")
    config = serve(AIP_PREDICT_ROUTE="", AIP_HEALTH_ROUTE="").http
    assert (config.predict_route, config.health_route) == ("/generate", "/ping")


@pytest.mark.parametrize("name", ["AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"])
def test_a_route_that_is_no_path_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=predict: a route begins with /"):
        read_environment({name: "predict"})


def test_the_model_is_the_flag_or_else_vertex_storage() -> None:
    uri = "gs://bucket/model"
    assert serve(AIP_STORAGE_URI=uri).model.model == "m"
    assert serve(model=None, AIP_STORAGE_URI=uri).model.model == uri
    config, worker_flags = serve_config([], read_environment({"AIP_STORAGE_URI": uri}))
    assert config.model.model == uri
    assert f"--model={uri}" in worker_flags


@pytest.mark.parametrize("variables", [{}, {"AIP_STORAGE_URI": ""}])
@pytest.mark.parametrize("arguments", [[], ["--model="], ["--model", ""]])
def test_no_model_is_an_error(arguments: list[str], variables: dict[str, str]) -> None:
    environment = read_environment(variables)
    with pytest.raises(ConfigError, match="--model is missing"):
        serve_config(arguments, environment)
    with pytest.raises(ConfigError, match="--model is missing"):
        router_config([*arguments, "--workers=h:1"], environment)
    with pytest.raises(ConfigError, match="--model is missing"):
        worker_config([*arguments, "--address=h:1"], environment, prog="worker")


@pytest.mark.parametrize(
    ("arguments", "variables", "level"),
    [
        ([], {}, "INFO"),
        ([], {"HEX_LLM_LOG_LEVEL": "WARNING"}, "WARNING"),
        ([], {"HEX_LLM_LOG_LEVEL": "debug"}, "DEBUG"),
        ([], {"HEX_LLM_VERBOSE_LOG": "true"}, "DEBUG"),
        ([], {"HEX_LLM_VERBOSE_LOG": "True", "HEX_LLM_LOG_LEVEL": "ERROR"}, "DEBUG"),
        ([], {"HEX_LLM_VERBOSE_LOG": "false", "HEX_LLM_LOG_LEVEL": "error"}, "ERROR"),
        (["--log_level=error"], {"HEX_LLM_LOG_LEVEL": "DEBUG"}, "ERROR"),
        (["--log-level=INFO"], {"HEX_LLM_VERBOSE_LOG": "true"}, "INFO"),
    ],
)
def test_the_log_level(arguments: list[str], variables: dict[str, str], level: str) -> None:
    assert serve(*arguments, **variables).log_level == level


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [("HEX_LLM_LOG_LEVEL", "LOUD", "DEBUG, INFO"), ("HEX_LLM_VERBOSE_LOG", "yes", "true or false")],
)
def test_a_bad_log_variable_is_refused_by_name(name: str, value: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}.*{wanted}"):
        read_environment({name: value})


def test_the_cache_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve().cache == Path.home() / ".cache" / "hexserve"
    assert serve(HEXSERVE_CACHE=str(tmp_path)).cache == tmp_path
    monkeypatch.chdir(tmp_path)
    assert serve(HEXSERVE_CACHE="here").cache == tmp_path / "here"


def test_a_deployment_is_colocated_unless_a_topology_is_given() -> None:
    assert serve().topology is None
    assert serve("--disagg-topo", "2,1").topology == Topology(2, 1)
    assert serve().data_parallel_size == 1
    assert serve("--data-parallel-size=2").data_parallel_size == 2
    with pytest.raises(ConfigError, match="--disagg_topo=3: "):
        serve("--disagg_topo=3")


def test_a_launcher_hands_on_what_concerns_workers() -> None:
    arguments = ["--model=m", "--port=9", "--disagg_topo=1,1", "--num-blocks=5", "--no-warmup"]
    config, worker_flags = serve_config([*arguments, "--max-running-seqs=3"], read_environment({}))
    assert (config.engine.num_blocks, config.engine.warmup) == (5, False)
    worker = worker_config(
        [*worker_flags, "--address=h:1"], read_environment({}), prog="python -m decode_worker"
    )
    assert worker.engine == config.engine
    assert worker.model == config.model


def test_workers_in_one_process_share_a_configuration() -> None:
    _, worker_flags = serve_config(
        ["--model=m", "--kv_transports=shm,grpc", "--block_size=16"], read_environment({})
    )
    arguments = [*worker_flags, "--address=unix:/folder", "--disagg_topo=2,1"]
    environment, prog = read_environment({}), "python -m deploy.threads"
    config, topology, replicas = threads_config(arguments, environment, prog)
    assert (topology, replicas) == (Topology(2, 1), 1)
    assert threads_config([*arguments, "--data_parallel_size=3"], environment, prog)[2] == 3
    assert (config.address, config.engine.block_size) == ("unix:/folder", 16)
    assert config.kv_transports == ("shm", "grpc")
    for address in ([], ["--address=h:1"], ["--address=unix:folder"]):
        with pytest.raises(ConfigError, match=r"--address=.*: unix:/folder is wanted"):
            threads_config(["--model=m", *address], read_environment({}), "threads")


def test_an_unset_method_is_left_to_the_launcher() -> None:
    assert serve().worker_distributed_method is None
    assert serve("--worker-distributed-method=thread").worker_distributed_method == "thread"


API_FLAGS = ("--tokenizer=./t", "--served_model_name=name", "--tokenizer_mode=slow")


@pytest.mark.parametrize("flag", API_FLAGS)
def test_what_concerns_the_api_alone_is_no_workers(flag: str) -> None:
    config, worker_flags = serve_config(["--model=m", *API_FLAGS], read_environment({}))
    assert (config.model.tokenizer, config.model.served_model_name) == ("./t", "name")
    assert worker_flags == ["--model=m"]
    router = router_config(["--model=m", "--workers=h:1", *API_FLAGS], read_environment({}))
    assert (router.model.tokenizer, router.model.served_model_name) == ("./t", "name")
    with pytest.raises(ConfigError, match=flag.partition("=")[0]):
        worker_config(["--model=m", "--address=h:1", flag], read_environment({}), prog="worker")


def test_the_demo_is_a_deployment_with_defaults_of_its_own() -> None:
    config, worker_flags, once = demo_config([], read_environment({}))
    assert (config.model.model, config.topology, config.http.port) == ("demo", Topology(1, 1), 0)
    assert worker_flags == ["--model=demo"]
    assert not once
    config, _, once = demo_config(["--once", "--disagg_topo=1,2"], read_environment({}))
    assert config.topology == Topology(1, 2)
    assert once


def test_the_demos_help_shows_its_own_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        demo_config(["--help"], read_environment({}))
    shown = capsys.readouterr().out
    assert "usage: hexserve demo [FLAGS]" in shown
    assert "--once" in shown


def test_a_worker_needs_an_address_and_a_router_workers() -> None:
    environment = read_environment({})
    with pytest.raises(ConfigError, match="--address is missing"):
        worker_config(["--model=m"], environment, prog="worker")
    with pytest.raises(ConfigError, match="--workers is missing"):
        router_config(["--model=m"], environment)
    with pytest.raises(ConfigError, match="--max_model_len"):
        router_config(["--model=m", "--workers=h:1", "--max_model_len=9"], environment)
    config = router_config(["--model=m", "--workers=unix:/a,h:1"], environment)
    assert config.workers == ("unix:/a", "h:1")
    assert config.http.host == "127.0.0.1"


@pytest.mark.parametrize(("given", "expected"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_is_quiet_unless_asked_otherwise(given: str | None, expected: str) -> None:
    code = (
        "import os, settings.environment as e; e.quiet_grpc(); print(os.environ['GRPC_VERBOSITY'])"
    )
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environ |= {} if given is None else {"GRPC_VERBOSITY": given}
    shown = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
    assert shown.strip() == expected


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ([], True),
        (["--host=::1"], True),
        (["--host=0.0.0.0"], False),
        (["--host=0.0.0.0", "--api_key=k"], False),
        (["--host=0.0.0.0", "--admin_key=a"], True),
        (["--api_key=k"], False),
        (["--api_key=k", "--admin_key=a"], True),
    ],
)
def test_administration_beyond_this_machine_or_beside_clients_wants_a_key(
    arguments: list[str], allowed: bool
) -> None:
    assert not serve(*arguments).http.admin
    if allowed:
        assert serve("--admin", *arguments).http.admin
    else:
        with pytest.raises(ConfigError, match=r"--admin with .* --admin_key"):
            serve("--admin", *arguments)
