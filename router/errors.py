"""What a client is told when a request cannot be served.

ServingError
├── BadRequest      400: a field is wrong; names the field, its value and the limit
│   └── ContextLengthExceeded: prompt and output do not fit the model's context
├── Unauthorized    401: no valid API key
├── Forbidden       403: nobody may ask so
├── ModelNotFound   404
├── BodyTimeout     408: the body did not arrive in time
├── DeadlinePassed  408: the request's own deadline has passed; an event in a stream
├── BodyTooLarge    413
├── Overloaded      429, Retry-After: too many requests, or every worker's queue is full
├── Unavailable     503, Retry-After: loading, draining, or no worker of a role is left
├── GenerationFailed 500: the request was taken and then lost
└── ReaderTooSlow   500: a client does not read its stream; an event, if it ever reads it
"""

from __future__ import annotations

from typing import Any


class ServingError(Exception):
    """Base: `status` is the HTTP status, the rest OpenAI's error object."""

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """OpenAI's error object, as every error response and error event carries it."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class BadRequest(ServingError):
    """400: the request can never be served as it is."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """400: the prompt, or the prompt with max_tokens, is longer than the model's context."""

    code = "context_length_exceeded"


class Unauthorized(ServingError):
    """401: no API key, or none of those that are valid here."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ServingError):
    """403: not for whoever asks like this, with whatever key."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class ModelNotFound(ServingError):
    """404: no model of that name is served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class BodyTimeout(ServingError):
    """408: the request's body did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class DeadlinePassed(ServingError):
    """408: `deadline_ms` was over before the answer was whole; nothing more is computed."""

    status = 408
    type = "timeout_error"
    code = "deadline_exceeded"

    def __init__(self) -> None:
        super().__init__("the request's deadline_ms has passed", param="deadline_ms")


class BodyTooLarge(ServingError):
    """413: the request's body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class Overloaded(ServingError):
    """429: no room, here or at any worker; the same request may succeed later."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after_s = 1


class Unavailable(ServingError):
    """503: not ready, draining, or a whole pool is gone."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"
    retry_after_s = 1


class GenerationFailed(ServingError):
    """500: taken, then lost; after the bounded retries."""

    code = "generation_failed"


class ReaderTooSlow(ServingError):
    """500: the client reads its stream so slowly that it was given up."""

    code = "reader_too_slow"
