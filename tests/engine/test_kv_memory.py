"""KV blocks by flag and by memory, and the message where they are too few."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine
from engine.kv_memory import CPU_BYTES, KVNeeds, PoolNeeds, choose_blocks, size_text, step_bytes
from engine.types import Role
from settings.config import GIB, EngineConfig, ModelConfig
from settings.errors import ConfigError
from tests.engine.tiny import CONFIG

MIB = 2**20


@dataclass
class Device:
    platform: str = "tpu"
    limit: int | None = 16 * GIB
    used: int = 6 * GIB

    def memory_stats(self) -> dict[str, int] | None:
        if self.limit is None:
            return None
        return {"bytes_limit": self.limit, "bytes_in_use": self.used}


def needs(sequence_blocks: int = 10, step: int = 2 * GIB) -> KVNeeds:
    return KVNeeds(PoolNeeds(MIB, sequence_blocks), step, max_model_len=32 * sequence_blocks)


def test_the_factor_takes_its_share_of_what_is_left_beside_a_step() -> None:
    config = EngineConfig(hbm_utilization_factor=0.5)
    assert choose_blocks(Device(), needs(), config) == (4 * 1024, 0)
    assert choose_blocks(Device(), needs(step=0), config) == (5 * 1024, 0)


def test_a_number_of_blocks_overrides_the_factor() -> None:
    assert choose_blocks(Device(limit=None), needs(), EngineConfig(num_blocks=77)) == (77, 0)


def test_cores_have_a_size_of_their_own() -> None:
    assert choose_blocks(Device("cpu", None), needs(), EngineConfig())[0] == CPU_BYTES // MIB


@pytest.mark.parametrize("device", [Device(limit=None), Device("gpu", limit=None)])
def test_a_device_that_does_not_tell_its_memory(device: Device) -> None:
    with pytest.raises(ConfigError, match=f"{device.platform} devices do not say.*--num_blocks"):
        choose_blocks(device, needs(), EngineConfig())


@pytest.mark.parametrize(
    ("device", "config", "messages"),
    [
        (
            Device(),
            EngineConfig(hbm_utilization_factor=0.25),
            ("there are 2048: 18.00 GiB are missing", "--hbm_utilization_factor=0.25", "8.00 GiB"),
        ),
        (Device(used=15 * GIB), EngineConfig(), ("there are 0: 20.00 GiB are missing", "0.00 MiB")),
        (Device("cpu", None), EngineConfig(), ("there are 1024: 19.00 GiB", "raise --num_blocks")),
        (Device(), EngineConfig(num_blocks=20479), ("there are 20479: 1.00 MiB", "--num_blocks")),
    ],
)
def test_too_little_for_one_sequence(
    device: Device, config: EngineConfig, messages: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_blocks(device, needs(20 * 1024), config)
    for message in (
        "one sequence of max_model_len=655360 needs 20480 KV blocks", "Lower --max_model_len",
        *messages,
    ):  # fmt: skip
        assert message in str(caught.value)


def test_just_enough_for_one_sequence() -> None:
    assert choose_blocks(Device(), needs(20480), EngineConfig(num_blocks=20480)) == (20480, 0)


def test_a_step_has_logits_counts_activations_and_chunks() -> None:
    one = {"tokens": 1, "rows": 1, "slots": 1, "width": 1, "vocab": 1, "chunk_bytes": 1}
    alone = {name: step_bytes(**(dict.fromkeys(one, 0) | {name: 10})) for name in one}
    assert alone == dict.fromkeys(one, 0) | {"chunk_bytes": 20}
    assert step_bytes(**(one | {"vocab": 1000})) - step_bytes(**(one | {"vocab": 0})) == 20_000
    assert step_bytes(**(one | {"tokens": 100})) - step_bytes(**one) == 4 * 99


def test_sizes_are_told_in_units_that_show_something() -> None:
    assert (size_text(3 * GIB), size_text(MIB // 2)) == ("3.00 GiB", "0.50 MiB")


_YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize("config", [EngineConfig(num_blocks=1), EngineConfig()])
@pytest.mark.parametrize(
    "length",
    [
        {"max_position_embeddings": 1 << 22},
        {"max_position_embeddings": 1 << 21, "rope_scaling": _YARN},
    ],
)
def test_what_cannot_fit_is_told_before_weights_are_read(
    tmp_path: Path, length: dict[str, Any], config: EngineConfig
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | length))
    with pytest.raises(ConfigError, match="one sequence of max_model_len=4194304 needs"):
        build_engine(tmp_path, ModelConfig(str(tmp_path)), config, Role.PREFILL)
