"""One request: timings, token counts and failures."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from benchmarks.openai_stream import Api, OpenAIStreamClient, RequestTiming, ServerError
from tests.benchmarks.fake_server import FakeServer


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        yield client


def test_tpot_counts_tokens_by_usage_and_itl_counts_events() -> None:
    timing = RequestTiming(sent=1.0, event_times=[2.0, 3.0, 5.0], output_tokens=7)
    assert timing.ttft == 1.0
    assert timing.tpot == 0.5
    assert timing.itls == [1.0, 2.0]


def test_tokens_fall_back_to_events() -> None:
    timing = RequestTiming(sent=1.0, event_times=[2.0, 3.0, 5.0])
    assert timing.tokens == 3
    assert timing.tpot == 1.5


def test_nothing_is_known_of_an_empty_stream() -> None:
    timing = RequestTiming(sent=1.0)
    assert (timing.ttft, timing.tpot, timing.itls) == (None, None, [])


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_stream_is_timed(http: httpx.AsyncClient, fake: FakeServer, api: Api) -> None:
    fake.ttft, fake.tpot = 0.05, 0.02
    client = OpenAIStreamClient(http, f"{fake.url}/v1/", api=api, extra={"user": "x"})
    await client.discover_model()
    timing = await client.send(client.encode("one two three", 5), 5)
    assert timing.error is None
    assert (timing.prompt_tokens, timing.output_tokens) == (3, 5)
    assert len(timing.event_times) == 5
    assert timing.ttft is not None
    assert timing.ttft >= 0.05
    assert timing.tpot is not None
    assert timing.tpot >= 0.005
    body = fake.bodies[0]
    assert body["model"] == "a-model"
    assert body["temperature"] == 0
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["user"] == "x"


async def test_ignore_eos_can_be_left_out(http: httpx.AsyncClient, fake: FakeServer) -> None:
    client = OpenAIStreamClient(http, fake.url, model="m", ignore_eos=False)
    await client.send(client.encode("one", 1), 1)
    assert "ignore_eos" not in fake.bodies[0]


async def test_connections_are_used_again(http: httpx.AsyncClient, fake: FakeServer) -> None:
    client = OpenAIStreamClient(http, fake.url, model="m")
    streams = []
    for _ in range(2):
        async with http.stream("GET", f"{fake.url}/v1/models") as answer:
            streams.append(answer.extensions["network_stream"].get_extra_info("client_addr"))
            await answer.aread()
        await client.send(client.encode("one", 3), 3)
    assert streams[0] == streams[1]


async def test_tokens_of_wide_events_are_counted_by_usage(
    http: httpx.AsyncClient, fake: FakeServer
) -> None:
    fake.tokens_per_event, fake.tpot = 4, 0.01
    client = OpenAIStreamClient(http, fake.url, model="m")
    timing = await client.send(client.encode("one", 12), 12)
    assert (timing.tokens, len(timing.event_times)) == (12, 3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("http", "HTTP 503: .*no room left"),
        ("event", "error event: .*engine died"),
        ("cut", r"stream ended without \[DONE\]"),
        ("garbage", "malformed event: JSONDecodeError"),
        ("silent", "stream carried no text"),
    ],
)
async def test_faults_become_errors(
    http: httpx.AsyncClient, fake: FakeServer, fault: str, message: str
) -> None:
    fake.fault, fake.tpot = fault, 0.001
    client = OpenAIStreamClient(http, fake.url, model="m")
    timing = await client.send(client.encode("one", 3), 3)
    assert timing.error is not None
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(timing.error)


async def test_a_stream_is_broken_off_on_request(http: httpx.AsyncClient, fake: FakeServer) -> None:
    fake.tpot = 0.01
    client = OpenAIStreamClient(http, fake.url, model="m")
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, stop.set)
    timing = await client.send(client.encode("one", 1000), 1000, stop)
    assert timing.stopped
    assert timing.error is None
    assert 0 < len(timing.event_times) < 100


async def test_an_unreachable_server_is_an_error(http: httpx.AsyncClient) -> None:
    client = OpenAIStreamClient(http, "http://127.0.0.1:9", model="m")
    timing = await client.send(client.encode("one", 3), 3)
    assert timing.error is not None
    assert timing.error.startswith("ConnectError")
    with pytest.raises(ServerError, match=r"/v1/models: ConnectError"):
        await client.discover_model()
