"""The API held to its own description by thousands of generated requests.

Minutes long: `make test-contract`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from checkpoint.chat_template import ChatTemplate
from checkpoint.tokenizer import Tokenizer
from router.app import create_app
from router.context import GatewayContext
from router.metrics import RouterMetrics
from tests.router.fakes import ScriptedGenerator, batches

pytestmark = pytest.mark.contract

EXAMPLES = 400
"""Of each operation that has parameters; together they are above 2,000 requests."""


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


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_what_is_described_is_what_is_done(case: schemathesis.Case) -> None:
    # A schema cannot say all that 400 is for: whether a prompt fits the context, for one.
    case.call_and_validate(excluded_checks=[positive_data_acceptance])
