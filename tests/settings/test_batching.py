"""Batching flags that do not fit each other are refused before anything is loaded."""

from __future__ import annotations

import pytest

from settings.batching import check_batching
from settings.command_line import serve_config, worker_config
from settings.config import BLOCK_SIZES, EngineConfig, with_platform_defaults
from settings.environment import read_environment
from settings.errors import ConfigError

MISFITS = [
    (("--prefill_len_padding=48",), "--prefill_len_padding=48 and --block_size=32"),
    (("--prefill_len_padding=3000", "--block_size=2048"), "--prefill_len_padding=3000 and "),
    (("--prefill_chunk_tokens=64",), "--enable_chunked_prefill is missing"),
    (
        ("--enable_chunked_prefill", "--prefill_chunk_tokens=31"),
        "--prefill_chunk_tokens=31 is less than a block: --block_size=32",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), MISFITS)
def test_misfits_are_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve_config(["--model=m", *arguments], read_environment({}))
    with pytest.raises(ConfigError, match=message):
        worker_config(["--model=m", "--address=h:1", *arguments], read_environment({}), "w")


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_default_padding_fits_every_block_size(block_size: int, platform: str) -> None:
    padding = with_platform_defaults(EngineConfig(), platform).prefill_len_padding
    given = EngineConfig(prefill_len_padding=padding, block_size=block_size)
    assert check_batching(given) is given
