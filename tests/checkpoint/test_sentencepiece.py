"""Tokenizers of SentencePiece models, beside what SentencePiece itself answers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoint import sentencepiece_convert
from checkpoint.errors import CheckpointError
from checkpoint.sentencepiece_file import Kind, read_sentencepiece
from checkpoint.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "sentencepiece"
NAMES = ("llama", "gemma")


def answers(name: str) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = json.loads((GOLDEN / name / "answers.json").read_text())
    return answers


def copied(name: str, folder: Path, **config: Any) -> Path:
    shutil.copy(GOLDEN / name / "tokenizer.model", folder)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_sentencepiece(name: str) -> None:
    tokenizer = Tokenizer.load(GOLDEN / name)
    for answer in answers(name):
        assert tokenizer.encode(answer["text"]) == answer["ids"], answer["text"]


@pytest.mark.parametrize("name", NAMES)
def test_texts_come_back(name: str) -> None:
    tokenizer = Tokenizer.load(GOLDEN / name)
    for answer in answers(name):
        assert tokenizer.decode(answer["ids"]) == answer["decoded"]
        pieces = tokenizer.detokenizer()
        text = "".join(pieces.push([token]) for token in answer["ids"]) + pieces.flush()
        assert text == answer["decoded"]


def test_what_a_model_says() -> None:
    model = read_sentencepiece(GOLDEN / "gemma" / "tokenizer.model")
    first = [piece.text for piece in model.pieces[:5]]
    assert first == ["<pad>", "</s>", "<s>", "<unk>", "<mask>"]
    assert (model.bos, model.eos, model.unknown) == ("<s>", "</s>", "<unk>")
    assert model.pieces[4].kind is Kind.USER_DEFINED
    assert (model.byte_fallback, model.add_dummy_prefix) == (True, False)


def test_the_json_files_add_to_it(tmp_path: Path) -> None:
    added = {"420": {"content": "<|end|>", "special": True}, "0": {"content": "<unk>"}}
    folder = copied(
        "llama", tmp_path, add_bos_token=False, add_eos_token=True, added_tokens_decoder=added
    )
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("a<|end|>")
    assert ids[-2:] == [420, 2]
    assert ids[0] != 1
    assert tokenizer.decode([420]) == ""
    tokenizer.check_vocabulary(420)  # an added token beyond is the requests' concern
    with pytest.raises(CheckpointError, match=r"token id 419, the model's vocab_size is 419"):
        tokenizer.check_vocabulary(419)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"500": {"content": "<x>"}}, "'<x>' should have id 500.* is 420"),
        ({"x": {"content": "<x>"}}, "has the id 'x'"),
        ({"420": {}}, "bad {}"),
    ],
)
def test_added_tokens_that_do_not_fit(tmp_path: Path, added: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(copied("llama", tmp_path, added_tokens_decoder=added))


def test_slow_reads_the_original(tmp_path: Path, fake_folder: Path) -> None:
    shutil.copytree(fake_folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: no such file.*=auto"):
        Tokenizer.load(tmp_path, "slow")
    copied("llama", tmp_path)
    assert Tokenizer.load(tmp_path).encode("A") == [65]
    assert Tokenizer.load(tmp_path, "slow").encode("A")[0] == 1


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff", b"{}", b"\x0a\x03\x0a\x01a"])
def test_broken_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: "):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", 1, "no byte-pair encoding"),
        ("remove_extra_whitespaces", True, "remove_extra_whitespaces"),
        ("whitespace_is_plain", False, "unusual way"),
    ],
)
def test_kinds_that_are_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any, message: str
) -> None:
    folder = copied("llama", tmp_path)
    model = dataclasses.replace(read_sentencepiece(folder / "tokenizer.model"), **{field: value})
    monkeypatch.setattr(sentencepiece_convert, "read_sentencepiece", lambda path: model)
    with pytest.raises(CheckpointError, match=f"cannot be converted, .*{message}.*transformers"):
        Tokenizer.load(folder)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.model either.*--tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["t.T", null]}}'
    )
    with pytest.raises(CheckpointError, match=r"auto_map.*--trust_remote_code"):
        Tokenizer.load(tmp_path)
