from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from checkpoint.fake import write_fake_model
from checkpoint.tokenizer import Tokenizer

TEXTS = [
    "Hello, world!",
    "👍🏽👨‍👩‍👧‍👦🏳️‍🌈 flags 🇫🇷🇯🇵",
    "今日はとても天気がいい。안녕하세요",
    "e\u0301 n\u0303 a\u0308\u0323 ก็ที่",
    "\ufffd real replacement \ufffd",
    "tabs\t and\r\nnewlines\n\n  spaces ",
    "<|im_start|>user\nhi<|im_end|>",
]

many = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], cuts: set[int], skip: bool) -> list[str]:
    """What a detokenizer gives for `ids` pushed in runs that end at `cuts`."""
    detokenizer = tokenizer.detokenizer(skip)
    ends = [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    starts = [0, *ends[:-1]]
    runs = [detokenizer.push(ids[a:b]) for a, b in zip(starts, ends, strict=True)]
    return [*runs, detokenizer.flush()]


def check(tokenizer: Tokenizer, ids: list[int], cuts: set[int], skip: bool) -> None:
    assert "".join(pieces(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_fake_model(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session", params=["bytes", "metaspace", "wordpiece", "none"])
def anchored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokenizers whose decoders are not byte-level; ids 0 to 255 are single bytes."""
    words = ["▁", "▁▁", "▁Hello", "▁a", "b", "##ing", "日本", "\ufffd", "e", "\u0301", "👍", "."]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = {
        "bytes": decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        "metaspace": decoders.Metaspace(),
        "wordpiece": decoders.WordPiece(),
        "none": None,
    }[request.param]
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "▁x")])
    backend.add_tokens([AddedToken("<tool> ", special=False)])
    folder = tmp_path_factory.mktemp("anchored")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def ids_below(limit: int) -> st.SearchStrategy[list[int]]:
    # Bytes that begin and continue characters are frequent, so that runs nearly fit.
    likely = st.sampled_from([0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x91, 0x8D, 0xC3, 0xA9, 0xED, 0x41])
    return st.lists(st.one_of(likely, st.integers(0, limit)), max_size=24)


cut_sets = st.sets(st.integers(0, 24))


@many
@given(ids=ids_below(520), cuts=cut_sets, skip=st.booleans())
def test_byte_level(byte_level: Tokenizer, ids: list[int], cuts: set[int], skip: bool) -> None:
    check(byte_level, ids, cuts, skip)


@many
@given(ids=ids_below(280), cuts=cut_sets, skip=st.booleans())
def test_other_decoders(anchored: Tokenizer, ids: list[int], cuts: set[int], skip: bool) -> None:
    check(anchored, ids, cuts, skip)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_token_by_token(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    parts = pieces(byte_level, ids, set(range(len(ids))), skip=False)
    assert "".join(parts) == text
    # Nothing is held longer than its character: every piece ends where a character ends.
    said = 0
    for count, part in enumerate(parts[:-1]):
        said += len(part)
        whole = bytes(ids[:count]).decode(errors="ignore") if max(ids) < 256 else None
        assert whole is None or text[:said] == whole


def test_half_a_character_is_held(byte_level: Tokenizer) -> None:
    detokenizer = byte_level.detokenizer()
    thumb = "👍".encode()
    assert [detokenizer.push([byte]) for byte in thumb] == ["", "", "", "👍"]
    assert detokenizer.push(thumb[:3]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_byte_tokens_are_held_until_their_run_ends(tmp_path: Path) -> None:
    vocabulary: dict[str, Any] = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocabulary | {"▁a": 256}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    detokenizer = Tokenizer.load(tmp_path).detokenizer()
    assert [detokenizer.push([token]) for token in (256, *"é".encode(), 256)] == [
        " a",
        "",
        "",
        "é a",
    ]


def test_time_is_linear(byte_level: Tokenizer, anchored: Tokenizer) -> None:
    for tokenizer in (byte_level, anchored):
        detokenizer = tokenizer.detokenizer()
        began = time.perf_counter()
        for token in [65, 260] * 10_000:
            detokenizer.push([token])
        # About 0.1 s; decoding all again for every id would take minutes.
        assert time.perf_counter() - began < 5


@functools.cache
def loaded(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.mark.model
@many
@given(
    ids=st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49_200)), max_size=24),
    cuts=cut_sets,
    skip=st.booleans(),
)
def test_demo_model(demo_folder: Path, ids: list[int], cuts: set[int], skip: bool) -> None:
    check(loaded(demo_folder), ids, cuts, skip)


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_demo_model_texts(demo_folder: Path, text: str) -> None:
    tokenizer = loaded(demo_folder)
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids, set(range(len(ids))), skip=False)) == text
