"""From the batching flags to an engine's limits."""

from __future__ import annotations

from engine.limits import Limits
from engine.programs import round_up
from engine.types import Role
from settings.config import BatchSizes, EngineConfig

PREFILL_CHUNK_TOKENS = 512
"""A prefill worker computes a prompt in chunks of so many tokens, and the KV of one travels while
the next is computed. Larger ones compute hardly faster."""
INTERLEAVED_PROMPTS = 16
"""Prompts that take turns on a prefill worker with --enable_chunked_prefill. Each costs a row of
penalty counts; a short prompt waits only behind so many that are longer."""


def derive_limits(
    roles: Role, sizes: BatchSizes, max_model_len: int, vocab: int, config: EngineConfig
) -> Limits:
    """What bounds the steps of a worker with `roles`.

    Where sequences decode as well, a step has room for a row of each beside its prompt tokens,
    which are a whole prompt's unless prompts are chunked.
    """
    decode = sizes.max_decode_seqs if Role.DECODE in roles else 0
    chunked = config.enable_chunked_prefill
    prompts = max(sizes.max_prefill_seqs, INTERLEAVED_PROMPTS) if chunked else 0
    slots = decode or prompts or sizes.max_prefill_seqs
    whole = decode and not chunked
    chunk = max_model_len if whole else min(max_model_len, _chunk_tokens(config, sizes))
    least = (sizes.max_prefill_seqs if decode else slots) + 1
    return Limits(
        max_seqs=slots,
        max_prefill_seqs=sizes.max_prefill_seqs,
        max_batch_tokens=max(chunk, least) + decode,
        max_waiting=config.max_queued_requests,
        max_model_len=max_model_len,
        vocab_size=vocab,
        max_exported_fraction=config.max_exported_fraction,
        interleave_prefills=chunked,
    )


def _chunk_tokens(config: EngineConfig, sizes: BatchSizes) -> int:
    if config.prefill_chunk_tokens is not None:
        return config.prefill_chunk_tokens
    least = config.block_size if config.enable_chunked_prefill else 1
    return round_up(max(PREFILL_CHUNK_TOKENS, least), sizes.prefill_len_padding)
