"""Accelerators of a host, and one for each worker process."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.devices import Accelerators, find_accelerators
from deploy.supervisor import LocalWorkers
from settings.config import Topology
from settings.environment import read_environment
from settings.errors import ConfigError

BOTH = frozenset({"tpu", "gpu"})


def host(folder: Path, *devices: str) -> Path:
    for name in devices:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("devices", "platforms", "backends", "expected"),
    [
        ((), "", BOTH, ("cpu", 0)),
        (("accel0", "accel1"), "", BOTH, ("tpu", 2)),
        (("vfio/0", "vfio/1", "vfio/vfio"), "", BOTH, ("tpu", 2)),
        (("nvidia0", "nvidiactl"), "", BOTH, ("gpu", 1)),
        (("nvidia0",), "cpu", BOTH, ("cpu", 0)),
        (("nvidia0",), "", frozenset(), ("cpu", 0)),
        (("accel0",), "tpu,cpu", BOTH, ("tpu", 1)),
    ],
)
def test_device_files_are_counted(
    tmp_path: Path,
    devices: tuple[str, ...],
    platforms: str,
    backends: frozenset[str],
    expected: tuple[str, int],
) -> None:
    found = find_accelerators(platforms, backends, {}, host(tmp_path, *devices))
    assert (found.kind, found.count) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2,3", Accelerators("gpu", 2, ("2", "3"))),
        ("GPU-5ebe9f43", Accelerators("gpu", 1, ("GPU-5ebe9f43",))),
        ("", Accelerators("cpu", 0)),
        ("-1", Accelerators("cpu", 0)),
    ],
)
def test_only_visible_devices_are_used(tmp_path: Path, text: str, expected: Accelerators) -> None:
    environment = read_environment({"CUDA_VISIBLE_DEVICES": text})
    dev = host(tmp_path, *(f"nvidia{number}" for number in range(4)))
    found = find_accelerators("", BOTH, environment.visible_devices, dev)
    assert found == expected
    for worker, name in enumerate(found.names):
        assert found.environment_of(worker, 1) == {"CUDA_VISIBLE_DEVICES": name}


def test_more_workers_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 workers .* need 4 tpu devices, this host has 2"):
        LocalWorkers(Topology(3, 1), [], Accelerators("tpu", 2))
    with pytest.raises(ConfigError, match=r"2 workers .* of 4 devices .* need 8 gpu devices"):
        LocalWorkers(Topology(1, 1), [], Accelerators("gpu", 4), devices=4)
    with pytest.raises(ConfigError, match=r"--tensor_parallel_size=3: a process has 1, 2, 4, 8"):
        LocalWorkers(None, [], Accelerators("tpu", 4), devices=3)
    with pytest.raises(ConfigError, match=r"2 workers .* of 3 devices .* need 6 tpu devices"):
        LocalWorkers(Topology(1, 1), [], Accelerators("tpu", 4), devices=3, in_threads=True)
    with pytest.raises(ConfigError, match=r"6 workers .*--data_parallel_size.* need 6 gpu"):
        LocalWorkers(Topology(2, 1), [], Accelerators("gpu", 4), replicas=2)
    with pytest.raises(ConfigError, match=r"3 workers .* need 6 tpu devices, this host has 4"):
        LocalWorkers(None, [], Accelerators("tpu", 4), devices=2, replicas=3, in_threads=True)
    Accelerators("tpu", 4).check_enough(4, 1)
    Accelerators("cpu", 0).check_enough(64, 1)


def test_each_worker_sees_one_device() -> None:
    tpu = Accelerators("tpu", 4)
    assert tpu.environment_of(3, 1)["TPU_VISIBLE_CHIPS"] == "3"
    assert Accelerators("gpu", 2).environment_of(1, 1) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert Accelerators("cpu", 0).environment_of(1, 1) == {}


def test_a_tensor_parallel_worker_sees_its_own_devices() -> None:
    assert Accelerators("tpu", 4).environment_of(1, 2) == {
        "TPU_VISIBLE_CHIPS": "2,3",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    named = Accelerators("gpu", 4, ("a", "b", "c", "d"))
    assert named.environment_of(1, 2) == {"CUDA_VISIBLE_DEVICES": "c,d"}
