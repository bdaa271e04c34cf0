"""Who may ask, and how many at once."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from router.error_responses import error_response
from router.errors import Overloaded, ServingError, Unauthorized

_ADMIN = "/admin/"
_INVOKE = "/invoke/"
"""What Vertex AI puts before a route that it does not know."""


class Gate:
    """ASGI middleware: lets requests in that have a key, as long as there are not too many.

    `/invoke/v1/…` is `/v1/…`, as Vertex AI forwards it.

    Args:
        api_keys: one of them is wanted as `Authorization: Bearer KEY`; none are wanted when
            there are none.
        admin_keys: in the place of those, for what is under `/admin`.
        max_requests: most requests served at once; those beyond it are answered by 429.
        open_paths: neither a key nor room is needed there: a busy server is not an ill one.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Iterable[str],
        admin_keys: Iterable[str] = (),
        max_requests: int,
        open_paths: Collection[str],
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._admin_digests = [_digest(key.encode()) for key in admin_keys]
        self._max_requests = max_requests
        self._open_paths = open_paths
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(_INVOKE):
            path = scope["path"].removeprefix(_INVOKE[:-1])
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        self._requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1

    def _refusal(self, scope: Scope) -> ServingError | None:
        admin = scope["path"].startswith(_ADMIN)
        wanted = self._admin_digests if admin else self._digests
        # API keys are clients': where there are any, none of them makes /admin open.
        keyed = bool(wanted or self._digests)
        # A browser asks by OPTIONS, without a key, what other sites may do.
        if keyed and scope["method"] != "OPTIONS" and not _has_key(scope, wanted):
            kind = "admin" if admin else "API"
            return Unauthorized(
                f"a valid {kind} key is wanted, as the header Authorization: Bearer KEY"
            )
        # Whoever has the admin key is not locked out by load: it may be why they come.
        if self._requests >= self._max_requests and not (admin and wanted):
            return Overloaded(f"{self._requests} requests are being served already")
        return None


def _has_key(scope: Scope, digests: Iterable[bytes]) -> bool:
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    kind, _, key = given.partition(b" ")
    if kind.lower() != b"bearer":
        return False
    digest = _digest(key.strip())
    # All are compared, each in constant time, so that time tells nothing of any key.
    return sum(hmac.compare_digest(digest, each) for each in digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
