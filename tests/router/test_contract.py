"""The API held to its own description by thousands of generated requests.

More than a minute long: `make test-contract`.
"""

from __future__ import annotations

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
)
LOOKED_UP = ("/v1/models", "/v1/models/{name}", "/version", "/health", "/metrics", "/ping")
REQUESTS = 2400
"""In all, that have a body."""


@pytest.fixture(scope="module")
def api(tokenizer: Tokenizer, model_folder: Path) -> schemathesis.BaseSchema:
    context = GatewayContext(
        generator=ScriptedGenerator(batches("Hé 👍", 2)),
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(model_folder),
        served_model_names=("org/model",),
        metrics=RouterMetrics("org/model"),
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
        # A schema cannot say all that 400 is for: whether a prompt fits the context, for one.
        response = case.call_and_validate(excluded_checks=[positive_data_acceptance])
        statuses.append(response.status_code)

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
