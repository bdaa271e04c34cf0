"""One streaming request to an OpenAI-compatible server, and its timings.

The reader is kept thin so that the client does not compete with the servers for
the cores they share: request bodies are encoded before the clock starts, the raw
body is split into lines without httpx's text decoder, and every event is parsed
exactly once. A time is taken when its bytes arrive, before they are parsed, so
events that arrive in one read share a time.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

Api = Literal["completions", "chat"]

_PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_ERROR_CHARS = 300


class ServerError(Exception):
    """The server could not be reached or did not answer as an OpenAI server."""


@dataclass(slots=True)
class RequestTiming:
    """What one streamed request showed to its client. Times are perf_counter seconds."""

    sent: float
    event_times: list[float] = field(default_factory=list)
    """Arrival of every event that carried text."""
    prompt_tokens: int | None = None
    """From the server's usage."""
    output_tokens: int | None = None
    """From the server's usage."""
    asked_tokens: int = 0
    stopped: bool = False
    """The client broke the stream off on purpose."""
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token: request sent to the first event with text."""
        return self.event_times[0] - self.sent if self.event_times else None

    @property
    def tokens(self) -> int:
        """Output tokens by the server's usage; events where it gave none."""
        return len(self.event_times) if self.output_tokens is None else self.output_tokens

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, with tokens counted by usage."""
        if len(self.event_times) < 2 or self.tokens < 2:
            return None
        return (self.event_times[-1] - self.event_times[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Pairs of neighbouring event times; their differences are the ITLs."""
        return list(zip(self.event_times, self.event_times[1:], strict=False))

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies, one per neighbouring pair of events."""
        return [later - earlier for earlier, later in self.gaps]


class OpenAIStreamClient:
    """Sends streaming requests to one server, greedy ones unless `extra` says otherwise.

    Args:
        extra: fields of every request.
        seeds: draws the `seed` of each request; without it they have none.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        base_url: str,
        *,
        model: str = "",
        api: Api = "completions",
        ignore_eos: bool = True,
        extra: Mapping[str, Any] | None = None,
        seeds: random.Random | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._http = http
        self._api = api
        self._url = self.base_url + _PATHS[api]
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        self._options: dict[str, Any] = {
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            self._options["ignore_eos"] = True
        self._options |= extra or {}
        self._seeds = seeds

    async def discover_model(self) -> None:
        """Take the first name of `/v1/models` as the model."""
        url = f"{self.base_url}/v1/models"
        try:
            answer = await self._http.get(url)
            answer.raise_for_status()
            self.model = str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"{url}: {_describe(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{url} names no model; give --model") from error

    def encode(self, prompt: str, max_tokens: int) -> bytes:
        """The request body, ready to be sent."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens}
        if self._api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self._seeds is not None:
            body["seed"] = self._seeds.getrandbits(32)
        return json.dumps(body | self._options).encode()

    async def send(
        self, body: bytes, asked_tokens: int, stop: asyncio.Event | None = None
    ) -> RequestTiming:
        """Send one encoded request and time its stream.

        Failures of the server end up in the timing's `error`. When `stop` is set,
        the stream is broken off at its next event.
        """
        timing = RequestTiming(sent=time.perf_counter(), asked_tokens=asked_tokens)
        try:
            async with self._http.stream(
                "POST", self._url, content=body, headers=self._headers
            ) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    timing.error = f"HTTP {answer.status_code}: {text[:_ERROR_CHARS]}"
                    return timing
                await self._read(answer, timing, stop)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            timing.error = _describe(error)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            timing.error = f"malformed event: {_describe(error)}"
        return timing

    async def _read(
        self, answer: httpx.Response, timing: RequestTiming, stop: asyncio.Event | None
    ) -> None:
        """Read events to the end of the body, so that the connection can be used again."""
        buffer = b""
        done = False
        async for chunk in answer.aiter_raw():
            now = time.perf_counter()
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    done = True
                    continue
                self._take_event(json.loads(data), timing, now)
                if timing.error:
                    return
            if stop is not None and stop.is_set() and not done:
                timing.stopped = True
                return
        if not done:
            timing.error = "stream ended without [DONE]"
        elif not timing.event_times:
            timing.error = "stream carried no text"

    def _take_event(self, event: dict[str, Any], timing: RequestTiming, now: float) -> None:
        if error := event.get("error"):
            timing.error = f"error event: {error}"[:_ERROR_CHARS]
            return
        if usage := event.get("usage"):
            timing.prompt_tokens = usage.get("prompt_tokens")
            timing.output_tokens = usage.get("completion_tokens")
        if choices := event.get("choices"):
            choice = choices[0]
            if self._api == "chat":
                delta = choice.get("delta") or {}
                text = delta.get("content") or delta.get("reasoning_content")
            else:
                text = choice.get("text")
            if text:
                timing.event_times.append(now)


def _describe(error: Exception) -> str:
    """The error's class and message; some of httpx's have no message of their own."""
    return f"{type(error).__name__}: {error}"[:_ERROR_CHARS].rstrip(": ")
