"""Turns a llama GGUF file into a Hugging Face model folder with bfloat16 weights.

Written for the demo model: the llama architecture without biases or rope scaling, tied
embeddings, and a byte-level BPE tokenizer of the "smollm" kind. Anything else is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from checkpoint.config import CONFIG_FILE, GENERATION_FILE
from checkpoint.errors import CheckpointError
from checkpoint.weights import SINGLE_FILE

OnTensor = Callable[[int, int], None]
"""Called with (tensors written, tensors in all)."""

_CONTROL_TOKEN = 3  # GGUF's token type of special tokens

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def convert_gguf(path: Path, folder: Path, on_tensor: OnTensor) -> None:
    """Writes the model in the GGUF file `path` into the existing empty `folder`.

    Raises:
        CheckpointError: the file is not a GGUF, or not of the kind this module knows.
        OSError: the folder cannot be written.
    """
    try:
        reader = gguf.GGUFReader(path)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from error
    metadata = _Metadata(reader, path)
    config = _config(metadata)
    _write_json(folder / CONFIG_FILE, config)
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / GENERATION_FILE, tokens)
    _write_tokenizer(metadata, config, folder)
    _write_weights(reader, path, config, folder / SINGLE_FILE, on_tensor)


class _Metadata:
    """The key-value part of a GGUF file, with errors that name the key."""

    def __init__(self, reader: gguf.GGUFReader, path: Path) -> None:
        self._fields = reader.fields
        self._path = path

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise CheckpointError(f"{self._path}: the GGUF has no {key!r}")
        return self._fields[key].contents()

    def expect(self, key: str, value: str) -> None:
        if self[key] != value:
            raise CheckpointError(f"{self._path}: {key} is {self[key]!r}, expected {value!r}")


def _config(metadata: _Metadata) -> dict[str, Any]:
    metadata.expect("general.architecture", "llama")
    heads = metadata["llama.attention.head_count"]
    rope_theta = metadata["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        # GGUF stores float32: seven digits give back the number that was meant (1e-05).
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6e}"),
        # Two spellings of one fact: readers know the old name or the new one.
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": metadata["llama.vocab_size"],
    }


def _write_tokenizer(metadata: _Metadata, config: dict[str, Any], folder: Path) -> None:
    metadata.expect("tokenizer.ggml.model", "gpt2")
    metadata.expect("tokenizer.ggml.pre", "smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": tokens[config["bos_token_id"]],
            "chat_template": metadata["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "eos_token": tokens[config["eos_token_id"]],
            "model_max_length": config["max_position_embeddings"],
            "pad_token": tokens[config["pad_token_id"]],
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        },
    )


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a folder with this llama `config` has, and its shape [out, in]."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}.weight"] = shape
    return shapes


def _write_weights(
    reader: gguf.GGUFReader,
    path: Path,
    config: dict[str, Any],
    target: Path,
    on_tensor: OnTensor,
) -> None:
    """Streams the tensors into one safetensors file, one dequantized tensor at a time."""
    tensors = {_hub_name(tensor.name, path): tensor for tensor in reader.tensors}
    shapes = expected_shapes(config)
    if tensors.keys() != shapes.keys():
        odd = sorted(tensors.keys() ^ shapes.keys())
        raise CheckpointError(f"{path}: tensors missing or left over: {', '.join(odd[:5])}")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        begin, end = end, end + 2 * math.prod(shapes[name])
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the tensors aligned
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, (name, values) in enumerate(_dequantized(tensors, config), start=1):
            if values.shape != shapes[name]:
                raise CheckpointError(
                    f"{path}: {name} has shape {list(values.shape)}, expected {list(shapes[name])}"
                )
            file.write(values.astype(ml_dtypes.bfloat16).view(np.uint8).data)
            on_tensor(done, len(shapes))


def _hub_name(name: str, path: Path) -> str:
    if name in _OTHER_TENSORS:
        return _OTHER_TENSORS[name]
    match name.split("."):
        case ["blk", number, kind, "weight"] if kind in _LAYER_TENSORS:
            return f"model.layers.{number}.{_LAYER_TENSORS[kind]}.weight"
    raise CheckpointError(f"{path}: unknown tensor {name!r}")


def _dequantized(
    tensors: dict[str, gguf.ReaderTensor], config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, float32 [out, in] or [out]) in the order of the names."""
    for name in sorted(tensors):
        values = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        if name.endswith("q_proj.weight"):
            values = _restore_row_order(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = _restore_row_order(values, config["num_key_value_heads"])
        yield name, values


def _restore_row_order(values: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's reordering of the rows of a q or k projection [heads * D, in].

    GGUF interleaves the two halves of each head (rows 0, D/2, 1, D/2 + 1, ...), as its rope
    rotates neighbours; Hugging Face's rope rotates row i with row i + D/2.
    """
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
