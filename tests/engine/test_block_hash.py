"""Block hashes: a chain over tokens, model and adapter, the same on every machine."""

from __future__ import annotations

import pytest

from engine.block_hash import block_hashes, root_hash

ROOT = root_hash(b"model")
TOKENS = list(range(40))


def test_published_values() -> None:
    """Routers and workers of different versions compare these."""
    assert ROOT == 9034959615780644095
    assert block_hashes([1, 2, 3, 4, 5], 2, ROOT) == [11779152786395302844, 15354578286393214007]


def test_full_blocks_only() -> None:
    assert len(block_hashes(TOKENS, 16, ROOT)) == 2
    assert block_hashes(TOKENS[:15], 16, ROOT) == []
    assert block_hashes([], 16, ROOT) == []


def test_each_covers_all_before_it() -> None:
    hashes = block_hashes(TOKENS, 8, ROOT)
    changed = block_hashes([*TOKENS[:8], 99, *TOKENS[9:]], 8, ROOT)
    assert changed[0] == hashes[0]
    assert not set(changed[1:]) & set(hashes)


def test_goes_on_from_a_block() -> None:
    hashes = block_hashes(TOKENS, 8, ROOT)
    assert block_hashes(TOKENS[16:], 8, hashes[1]) == hashes[2:]


@pytest.mark.parametrize("kind", [list, tuple])
def test_any_sequence(kind: type) -> None:
    assert block_hashes(kind(TOKENS), 8, ROOT) == block_hashes(TOKENS, 8, ROOT)


def test_models_and_adapters_share_nothing() -> None:
    roots = {
        root_hash(model, adapter) for model in (b"a", b"ab", b"") for adapter in ("", "b", "bc")
    }
    assert len(roots) == 9


def test_large_token_ids() -> None:
    high = 2**31 - 1
    assert block_hashes([high, 0], 2, ROOT) != block_hashes([0, high], 2, ROOT)
    with pytest.raises(OverflowError):
        block_hashes([2**31, 0], 2, ROOT)
