"""The launcher's parts by themselves: cores for workers, waiting under a signal, log lines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local import check_admin, check_transports, works_in_threads
from deploy.processes import plan_processes, plan_threads
from deploy.router import listen
from deploy.signals import in_daemon_thread, unless_stopped
from settings.config import HttpConfig, Topology
from settings.errors import ConfigError
from telemetry.logs import set_up_logging


@pytest.mark.parametrize(
    ("topology", "cores", "expected"),
    [
        (None, {0, 1, 2}, [("worker-0", None)]),
        (Topology(1, 1), {0, 1}, [("prefill-0", (0,)), ("decode-0", (1,))]),
        (Topology(1, 1), {2, 5, 7, 9}, [("prefill-0", (2, 5)), ("decode-0", (7, 9))]),
        (Topology(1, 1), {3}, [("prefill-0", None), ("decode-0", None)]),
        (Topology(2, 1), {0, 1}, [("prefill-0", None), ("prefill-1", None), ("decode-0", None)]),
        (Topology(1, 2), set(range(7)),
         [("prefill-0", (0, 1)), ("decode-0", (2, 3)), ("decode-1", (4, 5))]),
    ],
)  # fmt: skip
def test_workers_have_cores_of_their_own_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
    topology: Topology | None,
    cores: set[int],
    expected: list[tuple[str, tuple[int, ...] | None]],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    processes = plan_processes(topology, Path("/run/x"))
    assert [(process.name, process.cpus) for process in processes] == expected
    assert [process.flags for process in processes] == [
        (f"--address=unix:/run/x/{name}.sock",) for name, _ in expected
    ]


def test_roles_are_modules_of_their_own() -> None:
    modules = [process.module for process in plan_processes(Topology(1, 2), Path("/x"))]
    assert modules == ["prefill_worker", "decode_worker", "decode_worker"]
    assert [process.module for process in plan_processes(None, Path("/x"))] == ["deploy.colocated"]


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        (None, ["worker-0", "worker-1"]),
        (Topology(2, 1),
         ["prefill-0", "prefill-1", "prefill-2", "prefill-3", "decode-0", "decode-1"]),
    ],
)  # fmt: skip
def test_replicas_of_every_role(topology: Topology | None, names: list[str]) -> None:
    processes = plan_processes(topology, Path("/x"), replicas=2)
    assert [process.name for process in processes] == names
    threads = plan_threads(topology, Path("/x"), replicas=2)
    assert threads.flags[-1] == "--data_parallel_size=2"
    addresses = {address: role for each in processes for address, role in each.addresses.items()}
    assert threads.addresses == addresses
    assert len(addresses) == len(names)


def test_workers_in_threads_are_one_process_on_all_cores() -> None:
    process = plan_threads(Topology(2, 1), Path("/x"))
    assert (process.module, process.cpus) == ("deploy.threads", None)
    assert process.flags == ("--address=unix:/x", "--disagg_topo=2,1")
    assert plan_threads(None, Path("/x")).flags == ("--address=unix:/x",)


@pytest.mark.parametrize(
    ("method", "topology", "kind", "expected"),
    [
        (None, Topology(1, 1), "tpu", True),
        (None, None, "tpu", False),
        (None, Topology(1, 1), "gpu", False),
        (None, Topology(1, 1), "cpu", False),
        ("mp", Topology(1, 1), "tpu", False),
        ("thread", Topology(1, 1), "cpu", True),
        ("thread", None, "cpu", True),
    ],
)
def test_threads_are_the_choice_on_a_tpu_host_that_disaggregates(
    method: str | None, topology: Topology | None, kind: str, expected: bool
) -> None:
    assert works_in_threads(method, topology, kind) is expected


@pytest.mark.parametrize(
    ("transports", "topology", "in_threads", "reached"),
    [
        (None, "1,1", False, True),
        (("device",), "1,1", True, True),
        (("device", "grpc"), "1,1", False, True),
        (("shm",), "1,1", False, True),
        (("device",), "1,1", False, False),
        (("device",), None, True, False),
    ],
)
def test_the_device_transport_alone_needs_workers_in_one_process(
    transports: tuple[str, ...] | None, topology: str | None, in_threads: bool, reached: bool
) -> None:
    refused = contextlib.nullcontext() if reached else pytest.raises(ConfigError, match="thread")
    with refused:
        check_transports(
            transports, Topology.parse(topology) if topology else None, in_threads=in_threads
        )


def test_administration_is_refused_where_workers_end_together() -> None:
    admin = HttpConfig("127.0.0.1", 0, admin=True)
    check_admin(admin, in_threads=False)
    check_admin(HttpConfig("127.0.0.1", 0), in_threads=True)
    with pytest.raises(ConfigError, match=r"--admin: .* one process"):
        check_admin(admin, in_threads=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_listening_takes_a_port_once(host: str) -> None:
    with listen(HttpConfig(host, 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--host={host} --port={port}: Address already"):
            listen(HttpConfig(host, port))


def test_a_client_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.router.UNREAD_S", 1)
    with listen(HttpConfig("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        with client, connection:
            connection.settimeout(20)

            def send_on() -> None:
                while True:
                    connection.send(bytes(2**16))

            with pytest.raises(OSError, match=r"timed out|reset") as raised:
                send_on()
            assert raised.value.errno in (errno.ETIMEDOUT, errno.ECONNRESET)


async def test_work_that_ends_before_a_signal_gives_its_result() -> None:
    async def work() -> int:
        return 7

    assert await unless_stopped(work(), asyncio.Event()) == 7


async def test_work_that_fails_before_a_signal_raises() -> None:
    async def work() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await unless_stopped(work(), asyncio.Event())


async def test_a_signal_cancels_the_work() -> None:
    stop, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    assert await unless_stopped(work(), stop) is None
    async with asyncio.timeout(5):
        await cancelled.wait()


async def test_a_daemon_thread_gives_its_result_or_its_error() -> None:
    assert await in_daemon_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(divmod, 7, 0)


def test_a_daemon_thread_does_not_keep_the_loop_from_ending() -> None:
    release, ended = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(30)
        ended.set()

    async def main() -> None:
        assert await unless_stopped(in_daemon_thread(work), stopped()) is None

    def stopped() -> asyncio.Event:
        stop = asyncio.Event()
        stop.set()
        return stop

    asyncio.run(main())
    assert not ended.is_set()
    release.set()
    assert ended.wait(30)


@pytest.fixture
def loggers_kept() -> Iterator[None]:
    """Puts the loggers back as they were."""
    loggers = [logging.getLogger(name) for name in ("", "hexserve", "kvtransfer")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("loggers_kept")
def test_logs_show_our_lines_at_the_level_and_warnings_of_libraries() -> None:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        set_up_logging("INFO")
        logging.getLogger("hexserve.worker").info("one %s", "argument")
        logging.getLogger("hexserve.worker").debug("two")
        logging.getLogger("library").info("three")
        logging.getLogger("library").warning("four")
        set_up_logging("WARNING")
        logging.getLogger("hexserve.worker").info("five")
    lines = [line.partition(" ")[2] for line in stderr.getvalue().splitlines()]
    assert lines == ["I hexserve.worker: one argument", "W library: four"]
