"""From flags to an engine's limits."""

from __future__ import annotations

import pytest

from engine.batching import INTERLEAVED_PROMPTS, PREFILL_CHUNK_TOKENS, derive_limits
from engine.limits import Limits
from engine.types import COLOCATED, Role
from settings.config import EngineConfig, with_platform_defaults


def limits_of(roles: Role, max_model_len: int = 8192, **flags: object) -> Limits:
    config = EngineConfig(**flags)  # type: ignore[arg-type]
    sizes = with_platform_defaults(config, "cpu")
    return derive_limits(roles, sizes, max_model_len, 100, config)


def test_a_prefill_worker_computes_chunks_one_prompt_after_the_other() -> None:
    limits = limits_of(Role.PREFILL, max_prefill_seqs=3)
    assert (limits.max_seqs, limits.max_prefill_seqs) == (3, 3)
    assert limits.max_batch_tokens == PREFILL_CHUNK_TOKENS
    assert not limits.interleave_prefills


def test_chunked_prefill_lets_prompts_take_turns_on_a_prefill_worker() -> None:
    limits = limits_of(Role.PREFILL, enable_chunked_prefill=True)
    assert (limits.max_seqs, limits.max_prefill_seqs) == (INTERLEAVED_PROMPTS, 1)
    assert limits.max_batch_tokens == PREFILL_CHUNK_TOKENS
    assert limits.interleave_prefills
    limits = limits_of(Role.PREFILL, enable_chunked_prefill=True, max_prefill_seqs=40)
    assert limits.max_seqs == limits.max_prefill_seqs == 40


def test_without_it_one_worker_for_both_roles_computes_prompts_whole() -> None:
    assert limits_of(COLOCATED, max_decode_seqs=9).max_batch_tokens == 8192 + 9


@pytest.mark.parametrize(
    ("flags", "prompt_tokens"),
    [
        ({}, PREFILL_CHUNK_TOKENS),
        ({"prefill_chunk_tokens": 96}, 96),
        ({"block_size": 2048}, 2048),
        ({"prefill_len_padding": 384}, 768),
        ({"prefill_chunk_tokens": 32, "max_prefill_seqs": 40}, 41),
    ],
)
def test_the_budget_of_a_step_is_a_chunk_and_a_row_of_each_sequence(
    flags: dict[str, int], prompt_tokens: int
) -> None:
    limits = limits_of(COLOCATED, enable_chunked_prefill=True, max_decode_seqs=9, **flags)
    assert limits.max_batch_tokens == prompt_tokens + 9
    assert limits.max_seqs == 9


def test_no_chunk_is_longer_than_the_longest_prompt() -> None:
    flags = {"enable_chunked_prefill": True, "max_decode_seqs": 9}
    assert limits_of(COLOCATED, 100, **flags).max_batch_tokens == 100 + 9


@pytest.mark.parametrize("roles", [Role.PREFILL, Role.DECODE, COLOCATED])
@pytest.mark.parametrize("chunked", [True, False])
def test_the_smallest_sizes_leave_room_for_prompts(roles: Role, chunked: bool) -> None:
    """The scheduler refuses limits that leave none."""
    sizes = {"block_size": 8, "prefill_len_padding": 8, "max_decode_seqs": 1}
    limits = limits_of(roles, 8, enable_chunked_prefill=chunked, **sizes)
    assert limits.max_batch_tokens > limits.max_seqs
