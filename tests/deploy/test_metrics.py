"""The metrics of a whole deployment are those that the README has, and those that others read."""

from __future__ import annotations

import re
from pathlib import Path

from tests.deploy.conftest import Launch
from tests.deploy.launch import HEXSERVE, complete, get

README = Path(__file__).parents[2] / "README.md"
OF_VLLM = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("num_preemptions_total", "lora_requests_info", "cache_config_info"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
}
"""The names that tools for vLLM read, autoscalers and gateways among them."""


def documented(live: set[str]) -> set[str]:
    """The names in the README's table; "…_b" stands for a name that begins as the row's first."""
    names = set[str]()
    for row in re.findall(r"^\| (`hexserve:.*?) \|", README.read_text(encoding="utf-8"), re.M):
        first, *others = re.findall(r"`(.*?)`", row)
        names.add(first)
        for other in others:
            end = other.removeprefix("…")
            meant = {first[:at] + end for at in range(len(first))} & live
            assert len(meant) == 1, f"{other} beside {first} is one of {meant}"
            names |= meant
    return names


def test_names(launch: Launch) -> None:
    url = launch(*HEXSERVE, "serve", "--model=fake", "--port=0", "--disagg_topo=1,1").ready_url()
    complete(url, [5, 17, 300], 4)
    text = get(url, "/metrics").text
    live = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    live = {name for name in live if not name.endswith("_created")}
    ours = {name for name in live if name.startswith("hexserve:")}
    assert ours == documented(ours)
    assert {name.removeprefix("vllm:") for name in live - ours} == OF_VLLM
    for line in text.splitlines():
        assert line[0] == "#" or 'model_name="fake"' in line, line
