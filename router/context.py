"""What the gateway's endpoints work with."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from checkpoint.chat_template import ChatTemplate
from checkpoint.tokenizer import Tokenizer
from engine.types import ModelLimits
from router.errors import BadRequest, ModelNotFound, Unavailable
from router.fields import check_text, show
from router.generation import Generator
from router.metrics import RouterMetrics
from router.running import RunningRequests

ANY_MODEL = ("", "hexllm")
"""Names by which a client means whatever is served."""


@dataclass(frozen=True)
class GatewayContext:
    """One served model and the routes to it.

    Attributes:
        chat_template: None when the model has none; chat requests are then refused.
        served_model_names: at least one; the first is the answer's `model` when a request
            names none.
        generation_defaults: temperature, top_p, top_k, min_p and repetition_penalty for
            requests without them, from the model's generation_config.json.
        seeds: draws a seed for each request without one.
        predict_route, health_route: serve `/generate` and `/ping` there as well.
        api_keys: see router.gate; none leaves the API open to all who reach it.
        allowed_origins: web sites whose scripts may ask, or "*"; none are by default.
        max_requests: those served at once; more are refused with 429.
        max_body_bytes: larger request bodies are refused with 413.
        admin_keys: those for `/admin`, where API keys let nobody in; none leaves it open where
            there are no API keys either.
        drain_worker: what `/admin/drain` does; without it there is no such path.
        running: the requests that are with the generator.
        body_timeout_s: bodies that take longer to arrive are refused with 408.
    """

    generator: Generator
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    served_model_names: tuple[str, ...]
    metrics: RouterMetrics
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    seeds: random.Random = field(default_factory=random.SystemRandom)
    predict_route: str = "/generate"
    health_route: str = "/ping"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ()
    max_requests: int = 2048
    max_body_bytes: int = 10 * 1024 * 1024
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    drain_worker: Callable[[str], None] | None = None
    body_timeout_s: float = 60.0
    running: RunningRequests = field(default_factory=RunningRequests)
    created: int = field(default_factory=lambda: int(time.time()))

    def ready_limits(self) -> ModelLimits:
        """The model's limits.

        Raises:
            Unavailable: requests cannot be served now.
        """
        limits = self.generator.limits
        if limits is None or not self.generator.accepting:
            raise Unavailable("the server is not ready: it is loading, draining or lacks workers")
        return limits

    def resolve_model(self, name: object, param: str = "model") -> str:
        """The name to answer with for the `model` of a request; absent means any.

        `param` is the field's name for errors.

        Raises:
            BadRequest: it is no string.
            ModelNotFound: no such model is served.
        """
        if name is None or name in ANY_MODEL:
            return self.served_model_names[0]
        model = check_text(name, param)
        if model not in self.served_model_names:
            served = ", ".join(self.served_model_names)
            raise ModelNotFound(
                f"{param} {show(model)} does not exist here; served: {served}", param=param
            )
        return model

    def require_chat_template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            BadRequest: the model has none.
        """
        if self.chat_template is None:
            raise BadRequest("the model has no chat template; use /v1/completions instead")
        return self.chat_template
