"""The HTTP gateway's application."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware

from router.admin_api import admin_routes
from router.context import GatewayContext
from router.error_responses import add_error_handlers
from router.errors import Unavailable
from router.gate import Gate
from router.openai_api import openai_routes
from router.openapi import describe
from router.request_log import RequestLog
from router.token_api import token_routes
from router.vertex_api import predict

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(context: GatewayContext) -> FastAPI:
    """Build the application that serves one model."""
    app = FastAPI(title="hexserve", redirect_slashes=False, redoc_url=None)
    app.include_router(openai_routes(context))
    app.include_router(token_routes(context))
    if context.drain_worker is not None:
        app.include_router(admin_routes(context, context.drain_worker))

    async def generate(request: Request) -> Response:
        """Serve prediction instances."""
        return await predict(context, request)

    async def ping() -> Response:
        """Tell whether requests can be served: 200 or 503, without a body."""
        return _probed(context, Response())

    @app.get("/health")
    async def health() -> Response:
        """Describe the workers; 503 while requests cannot be served."""
        health = {"requests": len(context.running), **context.generator.health()}
        return _probed(context, JSONResponse(health))

    @app.get("/metrics")
    async def metrics() -> Response:
        """Expose the metrics to Prometheus."""
        limits = context.generator.limits
        if limits is not None:
            context.metrics.set_cache_config(
                block_size=limits.block_size, num_blocks=limits.num_blocks
            )
        return Response(context.metrics.render(), media_type=_METRICS_TYPE)

    # Added last: where a platform names a route that is there anyway, that one is matched.
    for path in dict.fromkeys(("/generate", context.predict_route)):
        app.add_api_route(path, generate, methods=["POST"])
    for path in dict.fromkeys(("/ping", context.health_route)):
        app.add_api_route(path, ping, methods=["GET"])
    add_error_handlers(app)
    _add_middleware(app, context)
    description = describe(context)
    app.openapi = lambda: description  # type: ignore[method-assign]
    return app


def _probed(context: GatewayContext, response: Response) -> Response:
    """A probe's answer, with the status and headers of what it found."""
    if not context.generator.ready:
        response.status_code = Unavailable.status
        response.headers["Retry-After"] = str(Unavailable.retry_after_s)
    return response


def _add_middleware(app: FastAPI, context: GatewayContext) -> None:
    """What every request passes; the last to be added is the first to be passed."""
    probed = {"/ping", "/health", "/metrics", context.health_route}
    app.add_middleware(
        Gate,
        api_keys=context.api_keys,
        admin_keys=context.admin_keys,
        max_requests=context.max_requests,
        open_paths=probed | {"/version", "/docs", "/openapi.json"},
    )
    app.add_middleware(RequestLog, probed=probed)
    if context.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=context.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
