"""Fixtures: fake servers and small workloads."""

from collections.abc import Iterator

import pytest

from benchmarks import serve
from benchmarks.workloads import BatchShape, MixedShape, Shapes
from tests.benchmarks.fake_server import FakeServer, serving


@pytest.fixture(scope="session")
def running_fakes() -> Iterator[tuple[FakeServer, FakeServer]]:
    """Two servers that every test shares; starting them takes longer than most tests."""
    with serving(FakeServer(name="a")) as first, serving(FakeServer(name="b")) as second:
        yield first, second


@pytest.fixture
def fakes(running_fakes: tuple[FakeServer, FakeServer]) -> tuple[FakeServer, FakeServer]:
    """Two fresh fake servers that write into one journal."""
    first, second = running_fakes
    first.reset()
    second.reset()
    second.journal = first.journal
    return first, second


@pytest.fixture
def fake(fakes: tuple[FakeServer, FakeServer]) -> FakeServer:
    """One fresh fake server."""
    return fakes[0]


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """Workloads of a fraction of a second, in the place of the full ones."""
    shapes: Shapes = {
        "w1": BatchShape(requests=2, prompt_tokens=8, output_tokens=4),
        "w2": BatchShape(requests=4, prompt_tokens=8, output_tokens=4, concurrent=True),
        "w3": BatchShape(requests=1, prompt_tokens=30, output_tokens=2),
        "w4": MixedShape(
            streams=2,
            stream_output_tokens=40,
            long_prompts=2,
            long_prompt_tokens=30,
            long_output_tokens=2,
            period=0.1,
            settle=0.3,
            quiet=0.25,
            drain=5.0,
        ),
    }
    monkeypatch.setattr(serve, "FULL", shapes)
    return shapes
