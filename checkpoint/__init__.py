"""Model id → folder: sources, configuration, weights, tokenizer, chat template. No jax."""

from checkpoint.chat_template import ChatTemplate
from checkpoint.config import CheckpointConfig, read_config
from checkpoint.detokenizer import Detokenizer
from checkpoint.errors import ChatTemplateError, CheckpointError
from checkpoint.source import resolve
from checkpoint.tokenizer import Tokenizer
from checkpoint.weights import TensorInfo, WeightFiles, open_weights

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "CheckpointConfig",
    "CheckpointError",
    "Detokenizer",
    "TensorInfo",
    "Tokenizer",
    "WeightFiles",
    "open_weights",
    "read_config",
    "resolve",
]
