"""The API held to its own description by thousands of generated requests.

More than a minute long: `make test-contract`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from checkpoint.chat_template import ChatTemplate
from checkpoint.tokenizer import Tokenizer
from router.app import create_app
from router.context import GatewayContext
from router.metrics import RouterMetrics
from tests.router.fakes import ScriptedGenerator, batches

pytestmark = pytest.mark.contract

POSTED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/generate",
    "/admin/drain",
)
LOOKED_UP = ("/v1/models", "/v1/models/{name}", "/version", "/health", "/metrics", "/ping")
REQUESTS = 2800
"""In all, that have a body."""

UNSAID = re.compile(
    r"has \d+ tokens|has no tokens|so at most \d+ can be asked for"
    r"|must be a token id from 0 to 511|must have token ids from 0 to 511|the vocabulary has 512"
    r"|half of a surrogate pair"
    r"|only allowed with|not allowed beside|is less than n=|cannot be streamed"
    r"|is more than the \d+ tokens of|of at least 1, got 0"
    r"|must be an integer.*, got -?\d+\.0$"
    r"|must be the JSON of an object|must be a string unless raw_response is true"
    r"|instances\[\d+\]\.(prompt|messages) is required"  # parameters may have it
    r"|chat template|can be streamed"
)
"""What a schema cannot say: what is refused for another reason is described wrongly."""


@pytest.fixture(scope="module")
def api(tokenizer: Tokenizer, model_folder: Path) -> schemathesis.BaseSchema:
    context = GatewayContext(
        generator=ScriptedGenerator(batches("Hé 👍", 2)),
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(model_folder),
        served_model_names=("org/model",),
        metrics=RouterMetrics("org/model"),
        drain_worker=lambda _: None,
        # Some bodies are larger than is allowed by default, which is not what is asked here.
        max_body_bytes=2**30,
    )
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(context))


def hold(operation: schemathesis.APIOperation, mode: GenerationMode, requests: int) -> None:
    """Send so many requests to an operation, and check each answer."""
    statuses: list[int] = []

    @given(case=operation.as_strategy(mode))
    @settings(
        max_examples=requests,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    def holds(case: schemathesis.Case) -> None:
        # The one check that is left out takes each refusal of a described body for a fault.
        response = case.call_and_validate(excluded_checks=[positive_data_acceptance])
        statuses.append(response.status_code)
        if mode.is_positive and response.status_code != 200:
            assert response.status_code == 400
            assert UNSAID.search(response.json()["error"]["message"]), response.text

    holds()
    assert len(statuses) >= requests
    if mode.is_positive:
        assert 200 in statuses, "whatever is sent, it is refused"


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", POSTED)
def test_bodies(api: schemathesis.BaseSchema, path: str, mode: GenerationMode) -> None:
    hold(api[path]["POST"], mode, REQUESTS // len(POSTED) // len(GenerationMode))


@pytest.mark.parametrize("path", LOOKED_UP)
def test_lookups(api: schemathesis.BaseSchema, path: str) -> None:
    hold(api[path]["GET"], GenerationMode.POSITIVE, 1)


def test_nothing_is_left_out(api: schemathesis.BaseSchema) -> None:
    assert {result.ok().path for result in api.get_all_operations()} == {*POSTED, *LOOKED_UP}
