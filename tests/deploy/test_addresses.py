"""What `--address` and `--advertise` may be, and what they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.addresses import MAX_SOCKET_PATH, WorkerAddress, parse_address
from kvtransfer import TRANSPORTS, device_uri
from settings.config import KV_TRANSPORTS, default_kv_transports
from settings.errors import ConfigError


@pytest.fixture
def private(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_a_unix_address_has_a_second_socket_beside_it(private: Path) -> None:
    assert parse_address(f"unix:{private}/a.sock", None) == WorkerAddress(
        f"unix:{private}/a.sock",
        private / "a.sock.kv",
        (
            f"shm://{private}/a.sock.kv",
            f"jax+unix://{private}/a.sock",
            f"grpc+unix://{private}/a.sock",
        ),
    )


def test_transports_are_offered_in_the_order_that_was_asked_for(private: Path) -> None:
    address = f"unix:{private}/a.sock"
    shm, grpc = f"shm://{private}/a.sock.kv", f"grpc+unix://{private}/a.sock"
    for transports, sources in {
        ("device", "shm", "grpc"): (device_uri("a"), shm, grpc),
        ("grpc", "device"): (grpc, device_uri("a")),
        ("shm",): (shm,),
    }.items():
        parsed = parse_address(address, None, transports, "a")
        assert parsed.sources == sources
        assert (parsed.shm_path is not None) == ("shm" in transports)
        assert (parsed.device_name is not None) == ("device" in transports)


def test_transports_of_which_none_can_be_had_are_refused(private: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv_transports=device: .* has only shm, jax, grpc"):
        parse_address(f"unix:{private}/a.sock", None, ("device",))
    with pytest.raises(ConfigError, match=r"--kv_transports=device,shm: .* has only jax, grpc"):
        parse_address("10.0.0.1:1", None, ("device", "shm"))


def test_jax_is_for_devices_that_are_not_cores() -> None:
    assert default_kv_transports("tpu") == KV_TRANSPORTS
    assert default_kv_transports("cpu") == ("device", "shm", "grpc")


def test_the_flag_and_the_library_know_the_same_transports() -> None:
    assert KV_TRANSPORTS == TRANSPORTS


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_a_folder_that_others_can_enter_is_refused(private: Path, mode: int) -> None:
    private.chmod(mode)
    with pytest.raises(ConfigError, match=f"is open to other users .mode {mode:04o}"):
        parse_address(f"unix:{private}/a.sock", None)


def test_a_path_too_long_for_a_socket_is_refused(private: Path) -> None:
    room = MAX_SOCKET_PATH - len(f"{private}/") - len(".kv")
    with pytest.raises(ConfigError, match=f"more than {MAX_SOCKET_PATH - 3} bytes"):
        parse_address(f"unix:{private}/{'x' * (room + 1)}", None)
    longest = parse_address(f"unix:{private}/{'x' * room}", None)
    assert len(str(longest.shm_path)) == MAX_SOCKET_PATH


def test_a_tcp_address_is_what_others_reach_unless_advertised() -> None:
    assert parse_address("10.0.0.1:8471", None) == WorkerAddress(
        "10.0.0.1:8471", None, ("jax://10.0.0.1:8471", "grpc://10.0.0.1:8471"), host="10.0.0.1"
    )
    assert parse_address("0.0.0.0:8471", "pod-3:9000") == WorkerAddress(
        "0.0.0.0:8471", None, ("jax://pod-3:9000", "grpc://pod-3:9000"), host="pod-3"
    )
    assert parse_address("[::1]:8471", None).sources[-1] == "grpc://[::1]:8471"


@pytest.mark.parametrize("address", ["0.0.0.0:8471", "[::]:8471"])
def test_an_address_that_nobody_can_reach_needs_another_to_advertise(address: str) -> None:
    with pytest.raises(ConfigError, match="give --advertise"):
        parse_address(address, None)


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":80", "host:0", "host:65536", "host:http", "/a/b", "host:-1", "host:²"],
)
def test_what_is_neither_a_path_nor_a_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="unix:/path or host:port is wanted"):
        parse_address(address, None)
    if address:
        with pytest.raises(ConfigError, match="--advertise"):
            parse_address("10.0.0.1:1", address)


@pytest.mark.parametrize("address", ["unix:", "unix:a.sock", "unix:./a.sock"])
def test_a_unix_path_is_absolute(address: str) -> None:
    with pytest.raises(ConfigError, match="wants an absolute path"):
        parse_address(address, None)
