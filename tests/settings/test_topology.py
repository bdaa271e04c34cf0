"""`--disagg_topo`, and the batch sizes of a platform."""

from __future__ import annotations

import pytest

from settings.config import BatchSizes, EngineConfig, Topology, with_platform_defaults
from settings.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "topology"),
    [("1,1", Topology(1, 1)), ("3,1", Topology(3, 1)), ("2, 12", Topology(2, 12))],
)
def test_two_numbers_are_prefill_and_decode_workers(text: str, topology: Topology) -> None:
    assert Topology.parse(text) == topology


@pytest.mark.parametrize("text", ["3", "a,b", "1,1,1", "1,", ",1", "", "1.0,1", "1;1", "1,1,"])
def test_anything_but_two_whole_numbers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--disagg_topo={text}: two whole numbers are wanted"):
        Topology.parse(text)


@pytest.mark.parametrize("text", ["0,1", "1,0", "-1,1", "0,0"])
def test_a_pool_without_workers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--disagg_topo={text}: at least 1 prefill and 1 decode"):
        Topology.parse(text)


@pytest.mark.parametrize(
    ("platform", "sizes"),
    [
        ("cpu", BatchSizes(1, 8, 64, 1, 8, 32)),
        ("tpu", BatchSizes(1, 8, 512, 8, 128, 256)),
        ("gpu", BatchSizes(1, 8, 512, 8, 128, 256)),
    ],
)
def test_unset_sizes_are_the_platforms(platform: str, sizes: BatchSizes) -> None:
    assert with_platform_defaults(EngineConfig(), platform) == sizes


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_given_sizes_win_on_every_platform(platform: str) -> None:
    sizes = BatchSizes(2, 3, 4, 5, 6, 7)
    given = EngineConfig(
        max_prefill_seqs=2,
        prefill_seqs_padding=3,
        prefill_len_padding=4,
        decode_seqs_padding=5,
        decode_blocks_padding=6,
        max_decode_seqs=7,
    )
    assert with_platform_defaults(given, platform) == sizes
