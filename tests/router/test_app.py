from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from router.errors import GenerationFailed, Overloaded, Unavailable
from router.load import PoolLoad
from tests.router.conftest import Client
from tests.router.fakes import Pause, ScriptedGenerator, batches
from tests.router.test_bad_input import check_error


async def test_models(client: Client) -> None:
    answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["org/model", "alias"]
    assert {"id", "object", "created", "owned_by"} <= set(answer["data"][0])
    assert (await client.get("/v1/models/org/model")).json() == answer["data"][0]


async def test_ready_and_not(client: Client, generator: ScriptedGenerator) -> None:
    response = await client.get("/ping")
    assert (response.status_code, response.content) == (200, b"")
    health = (await client.get("/health")).json()
    assert health == {"requests": 0, "ready": True, "workers": []}
    generator.ready = False
    response = await client.get("/ping")
    assert (response.status_code, response.content) == (503, b"")
    assert (await client.get("/health")).status_code == 503
    response = await client.post("/v1/completions", {"prompt": "p"})
    check_error(response, 503)
    assert response.headers["retry-after"] == "1"
    generator.ready, generator.limits = True, None
    check_error(await client.post("/v1/completions", {"prompt": "p"}), 503)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (Overloaded("full"), 429, "1"),
        (Unavailable("gone"), 503, "1"),
        (GenerationFailed("lost"), 500, None),
    ],
)
async def test_errors_before_the_first_text_have_their_status(
    client: Client,
    generator: ScriptedGenerator,
    error: Exception,
    status: int,
    retry: str | None,
    stream: bool,
) -> None:
    generator.script = [error]
    response = await client.post("/v1/completions", {"prompt": "p", "stream": stream})
    check_error(response, status, str(error))
    assert response.headers.get("retry-after") == retry


@pytest.mark.parametrize(
    ("error", "message"),
    [(GenerationFailed("lost"), "lost"), (RuntimeError("secret"), "internal error")],
)
async def test_an_error_inside_a_stream_is_its_last_event(
    client: Client, generator: ScriptedGenerator, error: Exception, message: str
) -> None:
    generator.script = [[97], error]
    first, last = await client.stream_completion()
    assert first["choices"][0]["text"] == "a"
    assert last["error"]["message"] == message
    assert set(last["error"]) == {"message", "type", "param", "code"}


async def test_an_output_without_an_end_is_an_error(
    client: Client, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut_off(*args: object, **kwargs: object) -> object:
        return
        yield

    monkeypatch.setattr(generator, "generate", cut_off)
    check_error(await client.post("/v1/completions", {"prompt": "p"}), 500, "without a reason")


async def test_public_ids_may_repeat_but_internal_ones_do_not(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x")
    for _ in range(2):
        response = await client.request(
            "POST", "/v1/completions", json={"prompt": "p"}, headers={"X-Request-Id": "mine"}
        )
        assert response.json()["id"] == "cmpl-mine"
    first, second = (call.request_id for call in generator.calls)
    assert first != second
    assert "mine" not in first


async def test_health_counts_requests_and_not_their_choices(
    client: Client, generator: ScriptedGenerator
) -> None:
    seen: list[int] = []

    def script(prompt: list[int]) -> Any:
        seen.append(len(client.context.running))
        yield [97]
        yield [256]

    generator.script = script
    await client.complete(prompt=["p", "q"], n=2)
    await client.post("/generate", {"instances": [{"prompt": "p"}, {"prompt": "q"}]})
    assert len(seen) == 6
    assert set(seen) == {1}
    pause = Pause()
    generator.script = [pause, [256]]
    asked = [asyncio.create_task(client.complete(prompt="p", n=2)) for _ in range(3)]
    async with asyncio.timeout(5):
        while len(generator.calls) < 6 + 6:  # noqa: ASYNC110 - what is waited for is no event
            await asyncio.sleep(0)
        assert (await client.get("/health")).json()["requests"] == 3
        pause.event.set()
        await asyncio.gather(*asked)
    assert (await client.get("/health")).json()["requests"] == 0


async def test_metrics(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("Hello", 2)
    generator.prefill_s = 500.0  # a worker's clock may run ahead: no queue time is below 0
    await client.complete(prompt="abc")
    await client.complete(prompt="abc", max_tokens=2)
    await client.complete(prompt="abc", stop="l")
    generator.script = [GenerationFailed("lost")]
    await client.post("/v1/completions", {"prompt": "p"})
    load = PoolLoad(
        running=3,
        waiting=2,
        compiles=4,
        free_blocks=20,
        cached_blocks=10,
        running_blocks=7,
        exported_blocks=3,
        total_blocks=41,
    )
    client.context.metrics.export_load(lambda: load, lambda: 5)
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if line[0] != "#")

    def value(name: str, extra: str = "") -> float:
        return float(lines[f'vllm:{name}{{engine="0",{extra}model_name="org/model"}}'])

    assert value("prompt_tokens_total") == 10
    assert value("generation_tokens_total") == 6 + 2 + 4
    assert value("request_success_total", 'finished_reason="stop",') == 2
    assert value("request_success_total", 'finished_reason="length",') == 1
    assert value("request_success_total", 'finished_reason="error",') == 1
    assert value("request_success_total", 'finished_reason="abort",') == 0
    assert value("time_to_first_token_seconds_count") == 3
    assert value("inter_token_latency_seconds_count") == 4 + 2
    assert value("e2e_request_latency_seconds_count") == 4
    assert value("request_decode_time_seconds_count") == 3
    assert value("num_requests_running") == 3
    assert value("num_requests_waiting") == 2 + 5
    assert value("request_queue_time_seconds_count") == 3
    assert value("request_queue_time_seconds_sum") == 0
    assert value("request_prefill_time_seconds_sum") == 1500
    lora = 'vllm:lora_requests_info{engine="0",max_lora="0",model_name="org/model",'
    assert lora + 'running_lora_adapters="",waiting_lora_adapters=""}' in lines
    assert value("kv_cache_usage_perc") == 0.25
    assert float(lines['hexserve:compiles_after_ready{engine="0",model_name="org/model"}']) == 4
    for state, blocks in {"free": 20, "cached": 10, "running": 7, "exported": 3}.items():
        name = f'hexserve:kv_blocks{{engine="0",model_name="org/model",state="{state}"}}'
        assert float(lines[name]) == blocks
    unaccounted = 'hexserve:kv_blocks_unaccounted{engine="0",model_name="org/model"}'
    assert float(lines[unaccounted]) == 1
    config = 'vllm:cache_config_info{block_size="16",engine="0",model_name="org/model",'
    assert float(lines[config + 'num_gpu_blocks="100"}']) == 1
    ttft = 'vllm:time_to_first_token_seconds_bucket{engine="0",le="2560.0",'
    assert ttft + 'model_name="org/model"}' in lines


def test_the_gateway_imports_no_jax() -> None:
    code = "import router.app, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
