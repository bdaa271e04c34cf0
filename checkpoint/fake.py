"""The fake model's folder: a configuration and a tokenizer, no weights.

The engine's fake model computes its answers by arithmetic, so tests can work them out by
hand. Its tokenizer helps: the ids 0 to 255 are the bytes of the text, then come three
special tokens, then filler words so that every id decodes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from checkpoint.byte_level import CHAR_OF_BYTE
from checkpoint.config import CONFIG_FILE
from checkpoint.errors import CheckpointError

MODEL_TYPE = "hexserve_fake"
EOS_ID = 256
SPECIAL_TOKENS = ("<|eos|>", "<|im_start|>", "<|im_end|>")  # ids from EOS_ID on
MIN_VOCAB_SIZE = EOS_ID + len(SPECIAL_TOKENS)

FOLDER_NAME = "fake-2"  # another number when the files change, as old ones lie in caches

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ call['function']['name'] + call['function']['arguments'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_fake_model(
    folder: Path, *, vocab_size: int = 512, max_position_embeddings: int = 65536
) -> Path:
    """Writes the fake model's files into `folder`, made where missing, and returns it.

    Raises:
        ValueError: vocab_size is below 259 (bytes and special tokens).
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE}, not {vocab_size}")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": MODEL_TYPE,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "eos_token_id": EOS_ID,
    }
    _write_json(folder / CONFIG_FILE, config)

    vocabulary = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}
    vocabulary |= {token: EOS_ID + i for i, token in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {f"<f{token}>": token for token in range(MIN_VOCAB_SIZE, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "chat_template": CHAT_TEMPLATE,
            "eos_token": SPECIAL_TOKENS[0],
            "model_max_length": max_position_embeddings,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    return folder


def cached_fake_model(cache: Path) -> Path:
    """Returns the default fake model's folder under `cache`, made whole or not at all.

    Raises:
        CheckpointError: the cache cannot be written.
    """
    target = cache / FOLDER_NAME
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{FOLDER_NAME}.", dir=cache) as work:
            folder = write_fake_model(Path(work) / "model")
            try:
                folder.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was first, with equal files
                    raise
    except OSError as error:
        raise CheckpointError(f"cannot write the fake model to {cache}: {error}") from error
    return target


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
