"""Command lines of the servers, and starting them."""

import os
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.logged_process import StartError
from benchmarks.peer_servers import (
    DISAGG,
    HEXSERVE,
    INT8,
    LLAMA_BF16,
    LLAMA_Q8,
    VLLM,
    VLLM_256,
    ServerCommand,
    hexserve_servers,
    llama_servers,
    running_servers,
    vllm_servers,
)

LATE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 2 and self.path == "/up" else 503)
        self.end_headers()
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_hexserve_has_three_placements_of_bfloat16() -> None:
    commands = hexserve_servers(Path("/m"))
    assert tuple(commands) == HEXSERVE
    assert all("--dtype=bfloat16" in each.command for each in commands.values())
    assert "--quantization=int8" in commands[INT8].command
    assert "--disagg_topo=1,1" in commands[DISAGG].command


def test_vllm_has_two_settings_that_differ_in_its_budget_alone() -> None:
    commands = vllm_servers(Path("/venv/bin/vllm"), Path("/m"))
    assert commands[VLLM_256].command[:-1] == commands[VLLM].command
    assert commands[VLLM_256].command[-1] == "--max-num-batched-tokens=256"
    assert commands[VLLM].environment == commands[VLLM_256].environment
    bound = commands[VLLM].environment["VLLM_CPU_OMP_THREADS_BIND"]
    assert set(map(int, bound.split(","))) == os.sched_getaffinity(0)


def test_vllms_openmp_is_that_of_its_environment(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libiomp5.so"
    preload = "LD_PRELOAD"
    without = vllm_servers(tmp_path / "bin" / "vllm", tmp_path)[VLLM].environment[preload]
    assert "libiomp5" not in without
    library.parent.mkdir()
    library.touch()
    found = vllm_servers(tmp_path / "bin" / "vllm", tmp_path)[VLLM].environment[preload]
    assert found.split()[-1] == str(library)


def test_llama_serves_the_files_that_are_given() -> None:
    assert list(llama_servers(Path("/l"), {LLAMA_BF16: Path("/f")})) == [LLAMA_BF16]
    both = llama_servers(Path("/l"), {LLAMA_Q8: Path("/q"), LLAMA_BF16: Path("/f")})
    assert both[LLAMA_Q8].command[-3:] == ("-m", "/q", "--no-repack")
    assert both[LLAMA_BF16].command[-2:] == ("-m", "/f")


def test_servers_are_waited_for_and_ended(tmp_path: Path) -> None:
    command = ServerCommand((sys.executable, "-c", LATE), "/up")
    with running_servers({"one": command, "two": command}, tmp_path) as servers:
        assert list(servers) == ["one", "two"]
        urls = [server.url for server in servers.values()]
        assert len(set(urls)) == 2
        assert all(httpx.get(f"{url}/up").status_code == 200 for url in urls)
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/up")


def test_a_server_that_ends_is_shown_with_its_last_lines(tmp_path: Path) -> None:
    command = ServerCommand((sys.executable, "-c", "raise SystemExit('no such model')"), "/up")
    with pytest.raises(StartError) as stop, running_servers({"bad": command}, tmp_path):
        pass
    assert str(stop.value).startswith("bad has ended with code 1")
    assert str(stop.value).endswith("no such model")


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = ServerCommand((str(tmp_path / "nothing"),), "/up")
    servers = running_servers({"gone": command}, tmp_path)
    with pytest.raises(StartError, match="gone cannot be started"), servers:
        pass
