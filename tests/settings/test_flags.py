"""The table of flags: names, defaults, values, and what is refused."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from settings import flag_parser, flags, http_flags, model_flags
from settings.errors import ConfigError
from settings.flags import Flag

GROUPS = (
    model_flags.MODEL, model_flags.API, model_flags.WEIGHTS, flags.ENGINE, flags.TRANSFER,
    flags.PROFILING, flags.TOPOLOGY, flags.DEPLOYMENT, http_flags.HTTP, flags.LOGGING,
    flags.WORKER, flags.ROUTER, flags.DEMO, flags.LIFE, flags.WORKER_LIFE, flags.ROUTING,
)  # fmt: skip

DEFAULTS: dict[str, Any] = {
    "model": None, "tokenizer": None, "tokenizer_mode": "auto", "trust_remote_code": False,
    "load_format": "auto", "max_model_len": None, "sliding_window": None, "seed": 0,
    "num_hosts": 1, "disagg_topo": None, "data_parallel_size": 1, "tensor_parallel_size": 1,
    "worker_distributed_method": None, "enable_jit": True, "warmup": True,
    "max_prefill_seqs": 1, "prefill_seqs_padding": 8, "prefill_len_padding": None,
    "decode_seqs_padding": None, "decode_blocks_padding": None, "max_decode_seqs": None,
    "enable_prefix_cache_hbm": False, "enable_chunked_prefill": False,
    "hbm_utilization_factor": 0.9, "num_blocks": None, "block_size": 32,
    "enable_lora": False, "max_lora_rank": 16, "enable_lora_cache": True,
    "max_num_mem_cached_lora": 16, "host": None, "port": None, "log_level": None,
}  # fmt: skip
"""Every flag of a Hex-LLM command line. The paddings' None is filled by platform, see config."""

SAMPLES: dict[str, tuple[str, Any]] = {
    "model": ("org/name", "org/name"), "tokenizer": ("./t", "./t"),
    "tokenizer_mode": ("slow", "slow"), "sliding_window": ("4096", 4096),
    "generation_config": ("ignore", "ignore"), "load_format": ("dummy", "dummy"),
    "max_model_len": ("2048", 2048), "seed": ("18446744073709551615", 2**64 - 1),
    "num_hosts": ("1", 1), "disagg_topo": ("3,1", "3,1"), "data_parallel_size": ("3", 3),
    "tensor_parallel_size": ("4", 4), "kv_cache_dtype": ("bfloat16", "bfloat16"),
    "kernels": ("reference", "reference"), "worker_distributed_method": ("mp", "mp"),
    "kv_transports": ("grpc, shm", ("grpc", "shm")),
    "max_prefill_seqs": ("4", 4), "prefill_seqs_padding": ("2", 2),
    "prefill_len_padding": ("128", 128), "decode_seqs_padding": ("4", 4),
    "decode_blocks_padding": ("16", 16), "max_decode_seqs": ("64", 64),
    "prefill_chunk_tokens": ("256", 256),
    "hbm_utilization_factor": ("0.5", 0.5), "num_blocks": ("100", 100),
    "block_size": ("2048", 2048), "max_lora_rank": ("16", 16),
    "max_num_mem_cached_lora": ("16", 16), "host": ("::1", "::1"), "port": ("0", 0),
    "log_level": ("debug", "DEBUG"), "dtype": ("bfloat16", "bfloat16"),
    "quantization": ("int8", "int8"),
    "revision": ("main", "main"), "served_model_name": ("m", "m"),
    "max_queued_requests": ("7", 7), "address": ("unix:/a/b", "unix:/a/b"),
    "advertise": ("h:1", "h:1"), "cpus": ("0,3", (0, 3)),
    "max_exported_fraction": ("0.25", 0.25), "jax_profile_dir": ("/p", "/p"),
    "drain_timeout_s": ("0", 0.0), "worker_wait_s": ("2.5", 2.5), "step_limit_s": ("60", 60.0),
    "max_lost_attempts": ("9", 9),
    "restart_wait_s": ("0.1", 0.1), "start_limit_s": ("90", 90.0),
    "api_key": ("a, b", ("a", "b")), "api_key_file": ("/k", "/k"),
    "admin_key": ("a, b", ("a", "b")), "admin_key_file": ("/k", "/k"),
    "allowed_origins": ("https://a, *", ("https://a", "*")),
    "ssl_certfile": ("/c", "/c"), "ssl_keyfile": ("/k", "/k"),
    "max_concurrent_requests": ("3", 3), "max_body_bytes": ("1000", 1000),
    "workers": ("unix:/a, h:1", ("unix:/a", "h:1")),
}  # fmt: skip
"""Flag → text on the command line and the value it means."""

ALL_FLAGS = [flag for group in GROUPS for flag in group.flags]
VALUED = [f for f in ALL_FLAGS if f.type is not None and f.supported != (None,)]
SWITCHES = [flag for flag in ALL_FLAGS if flag.type is None]


def parse(*arguments: str) -> argparse.Namespace:
    return flag_parser.parse(GROUPS, arguments, prog="test", description="")


def name_of(flag: Flag) -> str:
    return flag.name


def spellings(name: str) -> set[str]:
    first, _, rest = name.partition("_")
    return {name, name.replace("_", "-"), f"{first}_{rest.replace('_', '-')}" if rest else name}


def test_the_defaults_are_those_of_hex_llm() -> None:
    values = vars(parse())
    assert {name: values[name] for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("flag", VALUED, ids=name_of)
def test_a_value_follows_after_a_space_or_an_equals_sign(flag: Flag) -> None:
    text, value = SAMPLES[flag.name]
    for name in (spelling for each in (flag.name, *flag.aliases) for spelling in spellings(each)):
        assert getattr(parse(f"--{name}={text}"), flag.name) == value
        assert getattr(parse(f"--{name}", text), flag.name) == value


@pytest.mark.parametrize("flag", SWITCHES, ids=name_of)
def test_a_switch_is_turned_on_and_off(flag: Flag) -> None:
    spelled = {
        value: [
            *(f"--{name}={str(value).lower()}" for name in spellings(flag.name)),
            *(f"--{name}={value}" for name in spellings(flag.name)),
            *(f"--{'' if value else no}{n}" for n in spellings(flag.name) for no in ("no-", "no_")),
        ]
        for value in (True, False)
    }
    for value, arguments in spelled.items():
        for argument in arguments:
            if flag.supported and value not in flag.supported:
                with pytest.raises(ConfigError, match=f"--{flag.name}={str(value).lower()}"):
                    parse(argument)
            else:
                assert getattr(parse(argument), flag.name) is value


def test_the_last_of_several_values_counts() -> None:
    assert parse("--seed=1", "--max_running_seqs=2", "--seed=3").seed == 3
    assert parse("--max_decode_seqs=2", "--max-running-seqs=5").max_decode_seqs == 5
    assert parse("--no-warmup", "--warmup").warmup is True


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--no-enable-jit", "--enable_jit=false"),
        ("--enable_lora", "--enable_lora=true"),
        ("--max_lora_rank=8", "--max_lora_rank=8"),
        ("--enable_lora_cache=false", "--enable_lora_cache=false"),
        ("--max_num_mem_cached_lora=2", "--max_num_mem_cached_lora=2"),
        ("--num_hosts=2", "--num_hosts=2"),
        ("--worker_distributed_method=ray", "--worker_distributed_method=ray"),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(argument: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argument)
    assert f"{shown} is not supported yet" in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ("--max_model_len=0", "at least 1"),
        ("--drain_timeout_s=-1", "from 0 to 86400"),
        ("--worker_wait_s=nan", "from 0 to 86400"),
        ("--max_lost_attempts=0", "at least 1"),
        ("--step_limit_s=soon", "seconds are wanted"),
        ("--step_limit_s=0.5", "1 to 300"),
        ("--step_limit_s=301", "1 to 300"),
        ("--max_model_len=-5", "at least 1"),
        ("--num_blocks=many", "'many': a whole number"),
        ("--num_blocks=1.5", "'1.5': a whole number"),
        ("--num_blocks=", "a whole number"),
        ("--block_size=7", "8, 16, 32, 2048, 8192"),
        ("--block_size=x", "a whole number"),
        ("--seed=-1", "2**64"),
        ("--seed=18446744073709551616", "2**64"),
        ("--port=65536", "0 to 65535"),
        ("--port=-1", "0 to 65535"),
        ("--port=http", "'http': a whole number"),
        ("--hbm_utilization_factor=0", "above 0"),
        ("--hbm_utilization_factor=1.01", "at most 1"),
        ("--hbm_utilization_factor=nan", "at most 1"),
        ("--hbm_utilization_factor=x", "'x': a number"),
        ("--max_exported_fraction=0", "above 0"),
        ("--max_exported_fraction=1.5", "at most 1"),
        ("--dtype=int8", "float32"),
        ("--load_format=pt", "dummy"),
        ("--log_level=loud", "DEBUG, INFO"),
        ("--cpus=0,", "a whole number"),
        ("--cpus=-1", "from 0"),
        ("--workers=a:1,,b:2", "an address is empty"),
        ("--workers=a:1,foo", "'foo' is neither unix:/path nor host:port"),
        ("--workers=a:70000", "neither unix:/path nor host:port"),
        ("--workers=unix:a", "neither unix:/path nor host:port"),
        ("--workers=a:1,b:2,a:1", "an address is given twice"),
        ("--warmup=maybe", "true or false"),
        ("--api_key=", "key 1 of 1"),
        ("--api_key=good,b ad", "key 2 of 2"),
        ("--api_key=sécret", "ASCII"),
        ("--allowed_origins=https://a,", "a name is empty"),
        ("--max_body_bytes=0", "at least 1"),
        ("--max_concurrent_requests=0", "at least 1"),
        ("--kv_transports=shm,rdma", "some of device, shm, jax, grpc are wanted"),
        ("--kv_transports=shm,shm", "each once"),
        ("--kv_transports=", "some of device, shm, jax, grpc"),
        ("--seed", "expected one argument"),
    ],
)
def test_a_bad_value_is_refused_with_its_flag_and_what_is_wanted(
    argument: str, wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argument)
    assert argument.partition("=")[0] in str(caught.value)
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    "argument", ["--modle=x", "--mod=x", "stray", "--no-seed", "--no-enable_jit=true", "-m"]
)
def test_an_unknown_flag_is_refused_by_name(argument: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argument)
    name = argument.partition("=")[0].strip("-").replace("-", "_")
    assert name in str(caught.value).replace("-", "_")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model=a b", "--seed=7", "--no_warmup", "--hbm_utilization_factor=0.125"],
        ["--max_running_seqs=9", "--exit_with_stdin", "--cpus=1,2", "--workers=unix:/a,h:1"],
        ["--log_level=warning", "--port=0", "--block_size=8", "--model=--x", "--host=::"],
    ],
)
def test_spell_gives_a_command_line_that_means_the_same(arguments: list[str]) -> None:
    values = parse(*arguments)
    spelled = flag_parser.spell(values, GROUPS)
    assert parse(*spelled) == values
    assert len(spelled) == len(arguments)


def test_spell_gives_the_groups_that_are_asked_for_only() -> None:
    values = parse("--model=m", "--seed=1", "--port=9")
    assert flag_parser.spell(values, (http_flags.HTTP,)) == ["--port=9"]


def test_the_help_shows_every_flag_under_its_group_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for group in GROUPS:
        assert f" {group.title}: --{group.flags[0].name}" in shown
    for flag in ALL_FLAGS:
        assert f"--{flag.name}" in shown
        assert flag.help in shown
    assert "tokens of a KV block (default: 32)" in shown
    assert "serve LoRA adapters (default: false); not supported yet" in shown
