"""Whom the router lets in, as flags, a file and the environment say; and the terminal client's."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings.command_line import chat_config, router_config, serve_config
from settings.config import HttpConfig
from settings.environment import child_environment, read_environment
from settings.errors import ConfigError


def http(*arguments: str, **variables: str) -> HttpConfig:
    config, worker_flags = serve_config(["--model=m", *arguments], read_environment(variables))
    assert worker_flags == ["--model=m"]  # workers know nothing of HTTP, keys least of all
    environment = read_environment(variables)
    assert (
        router_config(["--model=m", "--workers=h:1", *arguments], environment).http == config.http
    )
    return config.http


def test_keys_come_from_everywhere_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("two\n\n  three \n")
    assert http().api_keys == ()
    keys = http("--api_key=one,two", f"--api_key_file={file}", HEXSERVE_API_KEY="four,five")
    assert keys.api_keys == ("one", "two", "three", "four", "five")
    assert "three" not in repr(keys)
    assert "four" not in repr(read_environment({"HEXSERVE_API_KEY": "four"}))


def test_admin_keys_come_from_everywhere_and_are_no_api_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("two\n")
    arguments = ("--admin_key=one", f"--admin_key_file={file}")
    assert http().admin_keys == ()
    keys = http(*arguments, HEXSERVE_ADMIN_KEY="three", HEXSERVE_API_KEY="four")
    assert (keys.admin_keys, keys.api_keys) == (("one", "two", "three"), ("four",))
    assert "three" not in repr(keys)
    assert "three" not in repr(read_environment({"HEXSERVE_ADMIN_KEY": "three"}))
    with pytest.raises(ConfigError, match="--admin_key: one of them is an API key") as caught:
        http(*arguments, HEXSERVE_API_KEY="two")
    assert "two" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "it has no key"),
        (b"\n \n", "it has no key"),
        (b"s\xff\n", "not a text file"),
        (b"SEC RET\n", "key 1 of 1"),
    ],
)
def test_a_bad_file_of_keys_is_refused_without_showing_it(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    for flag in ("--api_key_file", "--admin_key_file"):
        with pytest.raises(ConfigError, match=f"{flag}={file}: ") as caught:
            http(f"{flag}={file}")
        assert message in str(caught.value)
        assert "RET" not in str(caught.value)


def test_a_bad_key_is_refused_without_showing_it() -> None:
    for arguments, variables, name in (
        (["--api_key=SEC RET"], {}, "--api_key"),
        ([], {"HEXSERVE_API_KEY": "SEC RET"}, "HEXSERVE_API_KEY"),
        ([], {"HEXSERVE_ADMIN_KEY": "SEC RET"}, "HEXSERVE_ADMIN_KEY"),
    ):
        with pytest.raises(ConfigError, match=name) as caught:
            http(*arguments, **variables)
        assert "RET" not in str(caught.value)


def test_limits_origins_and_certificates() -> None:
    plain = http()
    assert (plain.allowed_origins, plain.scheme) == ((), "http")
    assert plain.max_body_bytes == 10 * 1024 * 1024
    config = http(
        "--allowed-origins=https://a",
        "--ssl_certfile=/c",
        "--ssl_keyfile=/k",
        "--max_body_bytes=9",
        "--max_concurrent_requests=8",
    )
    assert (config.allowed_origins, config.scheme) == (("https://a",), "https")
    assert (config.ssl_certfile, config.ssl_keyfile) == ("/c", "/k")
    assert (config.max_body_bytes, config.max_concurrent_requests) == (9, 8)
    with pytest.raises(ConfigError, match="--ssl_certfile is missing"):
        http("--ssl_keyfile=/k")


def test_the_terminal_client() -> None:
    config = chat_config([], read_environment({}))
    assert config.url == "http://127.0.0.1:7080"
    assert (config.api_key, config.model, config.temperature) == (None, None, None)
    arguments = ["--url=https://h/v1/", "--temperature=0", "--max_tokens=5", "--system=s"]
    config = chat_config(arguments, read_environment({"HEXSERVE_API_KEY": "k,l"}))
    assert (config.url, config.temperature, config.max_tokens) == ("https://h", 0.0, 5)
    assert (config.system, config.api_key) == ("s", "k")
    assert "'k'" not in repr(config)
    for bad in ("--url=h:1", "--temperature=3", "--temperature=nan", "--max_tokens=0"):
        with pytest.raises(ConfigError, match=bad.partition("=")[0]):
            chat_config([bad], read_environment({}))


def test_processes_that_are_started_have_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEXSERVE_API_KEY", "HEXSERVE_ADMIN_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("SOMETHING", "else")
    environment = child_environment({"MORE": "too"})
    assert "secret" not in environment.values()
    assert (environment["SOMETHING"], environment["MORE"]) == ("else", "too")
