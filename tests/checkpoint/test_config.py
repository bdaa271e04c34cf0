from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint.config import read_config
from checkpoint.errors import CheckpointError

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64}


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    folder.joinpath("config.json").write_text(json.dumps(config))
    if generation is not None:
        folder.joinpath("generation_config.json").write_text(json.dumps(generation))
    return folder


def test_facts(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, CONFIG))
    assert (config.model_type, config.vocab_size, config.max_position_embeddings) == (
        "llama",
        100,
        64,
    )
    assert config.raw == CONFIG
    assert config.eos_token_ids == ()
    assert config.generation_defaults == {}


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        (None, 3, (3,)),
        (2, [5, 2, 7], (5, 2, 7)),
        ([1, 2], [3], (3, 1, 2)),
        ([], None, ()),
    ],
)
def test_eos_ids_are_those_of_both_files(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    generation = {"eos_token_id": in_generation}
    folder = write(tmp_path, {**CONFIG, "eos_token_id": in_config}, generation)
    assert read_config(folder).eos_token_ids == expected


def test_what_is_null_in_the_text_part_is_said_around_it(tmp_path: Path) -> None:
    text = {"vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": None, "dtype": None}
    config = {"model_type": "a", "text_config": text, "eos_token_id": [1, 9], "dtype": "bfloat16"}
    read = read_config(write(tmp_path, config))
    assert (read.eos_token_ids, read.dtype) == ((1, 9), "bfloat16")


def test_generation_defaults(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "do_sample": True}
    folder = write(tmp_path, CONFIG, generation)
    assert read_config(folder).generation_defaults == {"temperature": 0.6, "top_p": 0.9}


def test_the_generation_config_may_be_ignored(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "eos_token_id": 3}
    folder = write(tmp_path, {**CONFIG, "eos_token_id": 2}, generation)
    config = read_config(folder, "ignore")
    assert (config.generation_defaults, config.eos_token_ids) == ({}, (2,))


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, None),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
    ],
)
def test_dtype(tmp_path: Path, fields: dict[str, str], dtype: str | None) -> None:
    assert read_config(write(tmp_path, CONFIG | fields)).dtype == dtype


def test_a_model_of_text_and_images_has_its_facts_inside(tmp_path: Path) -> None:
    text = {"vocab_size": 50, "max_position_embeddings": 32, "dtype": "float16"}
    outer = {"model_type": "both", "eos_token_id": 7, "text_config": text}
    config = read_config(write(tmp_path, outer))
    assert (config.model_type, config.vocab_size, config.max_position_embeddings) == (
        "both",
        50,
        32,
    )
    assert (config.dtype, config.eos_token_ids, config.raw) == ("float16", (7,), outer)


def test_what_gemma_3_leaves_unsaid(tmp_path: Path) -> None:
    outer = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    config = read_config(write(tmp_path, outer))
    assert (config.vocab_size, config.max_position_embeddings) == (262208, 131072)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch_dtype": 16}, "torch_dtype"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "100"}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size.*at least 1.*0"),
        ({"max_position_embeddings": True}, "max_position_embeddings"),
        ({"model_type": 3}, "model_type"),
        ({"eos_token_id": 100}, "eos_token_id 100.*vocab_size 100"),
        ({"eos_token_id": -1}, "eos_token_id -1"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [True]}, "eos_token_id"),
    ],
)
def test_bad_fields(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(write(tmp_path, {**CONFIG, **change}))


@pytest.mark.parametrize("name", list(CONFIG))
def test_missing_fields(tmp_path: Path, name: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != name}
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        read_config(write(tmp_path, config))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"model_type": "lla', "not valid JSON"),
        (b"[1]", "must hold a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_files(tmp_path: Path, data: bytes, message: str) -> None:
    tmp_path.joinpath("config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"config.json.*{message}"):
        read_config(tmp_path)
    write(tmp_path, CONFIG)
    tmp_path.joinpath("generation_config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"generation_config.json.*{message}"):
        read_config(tmp_path)


def test_missing_folder_and_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_config(tmp_path / "absent")
