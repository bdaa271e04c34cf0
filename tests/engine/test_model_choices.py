"""What flags and config.json make of a model together."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoint.config import CheckpointConfig, read_config
from engine.model_choices import choose_dtype, with_flags
from engine.models.traits import Traits, UnsupportedModel
from settings.config import ModelConfig
from settings.errors import ConfigError
from tests.engine.tiny import CONFIG


def checkpoint(folder: Path, **changes: Any) -> CheckpointConfig:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return read_config(folder)


@pytest.mark.parametrize(
    ("asked", "said", "platform", "chosen"),
    [
        ("auto", "bfloat16", "gpu", "bfloat16"),
        ("auto", "float16", "gpu", "float16"),
        ("auto", "float32", "tpu", "float32"),
        ("auto", "float16", "tpu", "bfloat16"),
        ("auto", "bfloat16", "cpu", "float32"),
        ("auto", "float8_e4m3fn", "gpu", "bfloat16"),
        ("float16", "bfloat16", "gpu", "float16"),
        ("bfloat16", "float32", "cpu", "bfloat16"),
    ],
)
def test_dtypes(tmp_path: Path, asked: str, said: str, platform: str, chosen: str) -> None:
    for field in ("dtype", "torch_dtype"):
        config = checkpoint(tmp_path, **{field: said})
        assert choose_dtype(asked, config, None, platform) == chosen


def test_a_config_without_a_dtype_leaves_it_to_the_weights(tmp_path: Path) -> None:
    config = checkpoint(tmp_path)
    tensors = {"a": np.zeros(100, np.float16), "b": np.zeros(40, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert choose_dtype("auto", config, tmp_path, "gpu") == "float16"
    save_file({"a": np.zeros(9, ml_dtypes.float8_e4m3fn)}, tmp_path / "model.safetensors")
    assert choose_dtype("auto", config, tmp_path, "gpu") == "bfloat16"
    assert choose_dtype("auto", config, None, "gpu") == "bfloat16"


def test_tpus_have_no_float16(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dtype=float16"):
        choose_dtype("float16", checkpoint(tmp_path), None, "tpu")


def test_a_window_of_ones_own(tmp_path: Path) -> None:
    def window_of(traits: Traits) -> int | None:
        (window,) = {kind.window for kind in traits.kinds}
        return window

    model = ModelConfig("m", sliding_window=64)
    mistral = CONFIG | {"model_type": "mistral", "sliding_window": 4096}
    config, traits = with_flags(checkpoint(tmp_path, **mistral), model)
    assert (config.raw["sliding_window"], window_of(traits)) == (64, 64)
    nested = checkpoint(tmp_path, text_config=mistral)
    config, traits = with_flags(nested, model)
    assert (config.raw["text_config"]["sliding_window"], window_of(traits)) == (64, 64)
    config, traits = with_flags(nested, ModelConfig("m"))
    assert (config, window_of(traits)) == (nested, 4096)


def test_a_window_as_it_is_without_the_flag(tmp_path: Path) -> None:
    said = checkpoint(tmp_path, model_type="mistral", sliding_window=64)
    assert with_flags(said, ModelConfig("m", sliding_window=64))[0] == said
    unsaid = checkpoint(tmp_path, model_type="mistral")  # Mistral's own is 4096
    _, traits = with_flags(unsaid, ModelConfig("m", sliding_window=4096))
    assert traits == with_flags(unsaid, ModelConfig("m"))[1]


def test_a_window_for_a_model_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--sliding_window=64: this model's layers have no win"):
        with_flags(checkpoint(tmp_path), ModelConfig("m", sliding_window=64))


def test_code_of_a_repository_is_not_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}
    unknown = checkpoint(tmp_path, model_type="new", auto_map=auto_map)
    for trust in (False, True):
        with pytest.raises(UnsupportedModel, match=r"'new'.*\(auto_map\), which is not run"):
            with_flags(unknown, ModelConfig("m", trust_remote_code=trust))
    # Many models that are supported have such code as well, from before transformers had them.
    with caplog.at_level(logging.WARNING, "hexserve.engine"):
        caplog.clear()
        with_flags(checkpoint(tmp_path, auto_map=auto_map), ModelConfig("m"))
        assert not caplog.messages
        with_flags(checkpoint(tmp_path), ModelConfig("m", trust_remote_code=True))
    assert caplog.messages == ["--trust_remote_code: no code of the model's repository is run"]
