"""The HTTP gateway's application."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from router.context import GatewayContext
from router.disconnect import ClientLeft
from router.errors import ServingError
from router.openai_api import openai_routes
from router.request_log import RequestLog
from router.vertex_api import predict

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(context: GatewayContext) -> FastAPI:
    """Build the application that serves one model."""
    app = FastAPI(title="hexserve", redirect_slashes=False)
    app.include_router(openai_routes(context))

    async def generate(request: Request) -> Response:
        """Serve prediction instances."""
        return await predict(context, request)

    async def ping() -> Response:
        """Tell whether requests can be served: 200 or 503, without a body."""
        return Response(status_code=200 if context.generator.ready else 503)

    @app.get("/health")
    async def health() -> Response:
        """Describe the workers; 503 while requests cannot be served."""
        return JSONResponse(
            context.generator.health(), status_code=200 if context.generator.ready else 503
        )

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
    _add_error_handlers(app)
    app.add_middleware(RequestLog, probed={"/ping", "/health", "/metrics", context.health_route})
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Give every error OpenAI's body."""

    async def serving_error(request: Request, error: ServingError) -> Response:
        headers = {}
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        if error.status == 413:
            headers["Connection"] = "close"  # the rest of the body may not have been read
        return JSONResponse(error.body(), status_code=error.status, headers=headers)

    async def http_error(request: Request, error: HTTPException) -> Response:
        messages = {
            404: f"no such path: {request.url.path}",
            405: f"{request.method} is not allowed on {request.url.path}",
        }
        refusal = ServingError(messages.get(error.status_code, error.detail))
        refusal.type = "invalid_request_error"
        return JSONResponse(refusal.body(), status_code=error.status_code, headers=error.headers)

    async def client_left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def unexpected(request: Request, error: Exception) -> Response:
        return JSONResponse(ServingError("internal error").body(), status_code=500)

    app.exception_handler(ServingError)(serving_error)
    app.exception_handler(HTTPException)(http_error)
    app.exception_handler(ClientLeft)(client_left)
    app.exception_handler(ClientDisconnect)(client_left)
    app.exception_handler(Exception)(unexpected)
