"""Which batching flags do not fit each other. The defaults do, on every platform."""

from __future__ import annotations

from settings.config import EngineConfig
from settings.errors import ConfigError


def check_batching(config: EngineConfig) -> EngineConfig:
    """`config` itself.

    Raises:
        ConfigError: two flags contradict each other; names both.
    """
    padding, block = config.prefill_len_padding, config.block_size
    if padding is not None and padding % block and block % padding:
        raise ConfigError(
            f"--prefill_len_padding={padding} and --block_size={block}: one must be a multiple "
            "of the other"
        )
    chunk = config.prefill_chunk_tokens
    if chunk is not None and not config.enable_chunked_prefill:
        raise ConfigError(f"--prefill_chunk_tokens={chunk}: --enable_chunked_prefill is missing")
    if chunk is not None and chunk < block:
        raise ConfigError(
            f"--prefill_chunk_tokens={chunk} is less than a block: --block_size={block}"
        )
    return config
