"""Makes the SentencePiece models in tests/golden/sentencepiece, and what their library answers.

    pip install sentencepiece && python tests/golden/make_sentencepiece.py

Two tiny tokenizers with the settings of Llama 2's and of Gemma's, so that tests of the
conversion need neither the library nor a download.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import sentencepiece

ROOT = Path(__file__).parents[2]
TARGET = Path(__file__).parent / "sentencepiece"
TEXTS = (
    "",
    " ",
    "Hello, world!",
    " leading and  double   spaces ",
    "trailing newline\n\n",
    "\tdef f(x):\n    return x + 12345\n",
    "naïve café 日本語 👍🏽 \u0000 ﬁ",
    "▁ is the mark itself",
    "the quick brown fox jumps over the lazy dog",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"add_dummy_prefix": True},
    "gemma": {
        "add_dummy_prefix": False,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "user_defined_symbols": ["<mask>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "▁▁"],
    },
}


def training_text() -> list[str]:
    draw = random.Random(0)
    words = (ROOT / "benchmarks" / "words.txt").read_text().split()
    lines = [" ".join(draw.choices(words, k=12)) for _ in range(3000)]
    return lines + ["def f(x):  return x + 1", "Hello, world! 67", "naïve café 日本語"] * 30


def make(name: str, settings: dict[str, Any]) -> None:
    folder = TARGET / name
    folder.mkdir(parents=True, exist_ok=True)
    trained = io.BytesIO()  # given a file's name, the model would carry it
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training_text()),
        model_writer=trained,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.995,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        **settings,
    )
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    model = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    answers = [{"text": text, "ids": model.encode(text, add_bos=True)} for text in TEXTS]
    for answer in answers:
        answer["decoded"] = model.decode(answer["ids"])
    (folder / "answers.json").write_text(json.dumps(answers, ensure_ascii=False, indent=1) + "\n")


for name, settings in SETTINGS.items():
    make(name, settings)
