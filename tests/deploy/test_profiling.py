"""--jax_profile_dir: a signal, and each worker writes down what it does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from deploy import profiling
from deploy.devices import Accelerators
from deploy.processes import WorkerProcess
from deploy.supervisor import LocalWorkers
from settings.config import Topology
from tests.deploy.conftest import Launch
from tests.deploy.launch import HEXSERVE


async def test_a_signal_has_a_trace_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(profiling, "PROFILE_S", 0.05)
    profiling.profile_on_signal(tmp_path)
    try:
        for _ in range(2):  # the second one comes while the first is recorded
            os.kill(os.getpid(), signal.SIGUSR2)
        async with asyncio.timeout(30):
            while "profile written" not in caplog.text:
                jnp.ones(8).sum().block_until_ready()
                await asyncio.sleep(0.001)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR2)
    (trace,) = (tmp_path / f"worker-{os.getpid()}").glob("**/*.xplane.pb")
    assert jax.profiler.ProfileData.from_file(str(trace)).planes


async def test_a_folder_that_cannot_be_written_is_told_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profiling, "PROFILE_S", 0.0)
    blocked = tmp_path / "file"
    blocked.write_text("")
    await profiling._record(blocked / "worker")
    assert "no profile" in caplog.text


def test_the_server_hands_the_signal_on_to_each_worker(launch: Launch, tmp_path: Path) -> None:
    serve = (*HEXSERVE, "serve", "--model=fake", "--port=0", "--disagg_topo=1,1")
    server = launch(*serve, f"--jax_profile_dir={tmp_path}")
    server.ready_url()
    os.kill(server.pid, signal.SIGUSR2)
    for worker in ("prefill-0", "decode-0"):
        server.wait_for(rf"\[{worker}\] .*recording a profile")


async def test_a_worker_that_is_still_starting_is_not_ended_by_the_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(
        WorkerProcess, "send", lambda self, number: sent.append((self.name, number))
    )
    workers = LocalWorkers(Topology(1, 1), [], Accelerators("cpu", 0))
    try:
        prefill, _ = workers.addresses
        workers._hear(prefill, True)
        workers.profile()
        assert sent == [("prefill-0", signal.SIGUSR2)]
    finally:
        await workers.stop()
