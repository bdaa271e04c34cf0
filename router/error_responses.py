"""Gives every error OpenAI's body and the right status."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from router.disconnect import ClientLeft
from router.errors import BodyTimeout, BodyTooLarge, ServingError


def error_response(error: ServingError) -> Response:
    """The response that tells a client of `error`."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, (BodyTimeout, BodyTooLarge)):
        headers["Connection"] = "close"  # the rest of the body may not have been read
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    """Have `app` answer every exception by OpenAI's body."""

    async def serving_error(request: Request, error: ServingError) -> Response:
        return error_response(error)

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
