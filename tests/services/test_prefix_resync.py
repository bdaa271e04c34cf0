"""A worker whose block events contradict the router's index tells all of its blocks again."""

from __future__ import annotations

import pytest

from protos.block_codec import BlockChanges
from router.metrics import RouterMetrics
from tests.services.deployment import BLOCK_SIZE, deployment, eventually, expected, prompt_of

PROMPT = prompt_of(24)


@pytest.mark.parametrize("lie", ["evicts what is not there", "adds what is there"])
async def test_a_worker_that_contradicts_the_index_is_asked_again_and_counted(lie: str) -> None:
    async with deployment("1,1", hit_tokens=2 * BLOCK_SIZE) as served:
        prefixes = served.pool.prefixes
        metrics = RouterMetrics("m")
        metrics.export_prefix_index(prefixes)
        assert await served.ask(PROMPT) == expected(PROMPT, 8)
        await served.until_idle()
        worker = next(each for each in served.pool.fleet.workers if each is not None)
        row = worker.row
        assert row is not None
        await eventually(lambda: prefixes.tokens(PROMPT)[row] > 0)
        known, found = len(prefixes.index), int(prefixes.tokens(PROMPT)[row])
        first = prefixes.chains(PROMPT)[BLOCK_SIZE][0]
        told = (
            BlockChanges((), (first ^ 1,)) if lie.startswith("evicts") else BlockChanges((first,))
        )
        prefixes.changed(worker, told)
        assert prefixes.resyncs == 1
        assert prefixes.tokens(PROMPT)[row] == 0, "nothing of what it told counts"
        await eventually(lambda: prefixes.index.follows(row))
        assert (len(prefixes.index), prefixes.tokens(PROMPT)[row]) == (known, found)
        shown = metrics.render().decode()
        labels = 'engine="0",model_name="m"'
        assert f"hexserve:prefix_index_resyncs_total{{{labels}}} 1.0" in shown
        assert f"hexserve:prefix_index_blocks{{{labels}}} {float(known)}" in shown
        asked = f'hexserve:routed_asked_tokens_total{{{labels},place="prefill"}}'
        assert f"{asked} {float(len(PROMPT))}" in shown
