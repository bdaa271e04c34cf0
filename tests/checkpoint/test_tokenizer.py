from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from checkpoint.errors import CheckpointError
from checkpoint.fake import EOS_ID, cached_fake_model, write_fake_model
from checkpoint.tokenizer import Tokenizer


def test_fake_ids_are_bytes(fake_folder: Path) -> None:
    tokenizer = Tokenizer.load(fake_folder)
    text = "A b\n\x00é👍"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert tokenizer.encode("a<|im_end|>b") == [97, 258, 98]
    assert tokenizer.decode([97, EOS_ID, 300]) == "a<f300>"
    assert tokenizer.decode([97, EOS_ID], skip_special_tokens=False) == "a<|eos|>"


def test_unknown_ids_have_no_text(fake_folder: Path) -> None:
    tokenizer = Tokenizer.load(fake_folder)
    assert tokenizer.decode([97, 10_000, 98]) == "ab"
    assert tokenizer.token_bytes(10_000) == b""
    assert tokenizer.token_text(10_000) == ""
    assert tokenizer.detokenizer().push([97, 10_000, 98]) == "ab"


def test_lone_surrogate_is_refused(fake_folder: Path) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        Tokenizer.load(fake_folder).encode("a\ud800")


def test_fake_model_is_cached_once(tmp_path: Path) -> None:
    folder = cached_fake_model(tmp_path / "cache")
    assert cached_fake_model(tmp_path / "cache") == folder
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_fake_model_needs_room_for_its_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"259.*258"):
        write_fake_model(tmp_path, vocab_size=258)
    Tokenizer.load(write_fake_model(tmp_path, vocab_size=259))


def test_post_processor_truncation_and_padding(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"<s>": 0, "a": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a a a a a") == [0, 1, 1, 1, 1, 1]
    assert tokenizer.encode("a", add_special_tokens=False) == [1]


def test_sentencepiece_like_bytes(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<0xE4>": 1, "▁Hi": 2, "<s>▁": 3}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<s>▁", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert [tokenizer.token_bytes(i) for i in range(4)] == [
        b"<unk>",
        b"\xe4",
        b" Hi",
        "<s>▁".encode(),
    ]
    assert [tokenizer.token_text(i) for i in (1, 2)] == ["\ufffd", " Hi"]


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"version": "1.0", "model": {}}'])
def test_broken_tokenizer(tmp_path: Path, data: bytes) -> None:
    tmp_path.joinpath("tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not a readable tokenizer"):
        Tokenizer.load(tmp_path)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer.json: no such file"):
        Tokenizer.load(tmp_path)


def test_mixed_byte_level_decoder_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.BPE())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="ByteLevel, Strip"):
        Tokenizer.load(tmp_path)


@pytest.mark.model
def test_demo_model(demo_folder: Path) -> None:
    tokenizer = Tokenizer.load(demo_folder)
    assert tokenizer.encode("x  3") == [104, 256, 35]
    text = "Hello, café 👍🏽 12345\n\n今日は"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_text(tokenizer.encode(" the")[0]) == " the"


@pytest.mark.model
def test_demo_model_agrees_with_the_golden_file(demo_folder: Path) -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden" / "smollm2.json").read_text())
    tokenizer = Tokenizer.load(demo_folder)
    assert tokenizer.encode(golden["chat"]["prompt"]) == golden["chat"]["ids"]
