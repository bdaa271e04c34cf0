"""A short load of guidellm's: it asks /health and /v1/models, and reads usage from chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import Served, run_client

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

REQUESTS, OUTPUT_TOKENS = 20, 16


def test_a_short_load(served: Served, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run_client(
        ("guidellm", "run",
         "--backend", f"kind=openai_http,target={served.url},model=fake",
         "--profile", "kind=concurrent,streams=4",
         "--constraint", f"kind=max_requests,count={REQUESTS}",
         "--tokenizer", f"kind=huggingface_auto,model={served.tokenizer}",
         "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}",
         "--output", f"kind=json,path={report}",
         "--disable-console-interactive"),
        tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    done = benchmark["requests"]
    assert len(done["successful"]) == REQUESTS
    assert not done["errored"]
    assert {each["output_tokens"] for each in done["successful"]} == {OUTPUT_TOKENS}
