"""`hexserve chat`: a conversation at the terminal, streamed as it is generated."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import httpx

from settings.config import ChatConfig

HINT = "Ask something; /reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."
CONNECT_S = 10.0


class ChatFailed(Exception):
    """The server did not answer, or answered by an error; the message tells a person."""


def chat(
    config: ChatConfig,
    *,
    read: Callable[[str], str] = input,
    out: TextIO = sys.stdout,
    transport: httpx.BaseTransport | None = None,
) -> None:
    """Ask `read` for messages and write answers to `out` until `read` has no more.

    A failed question is told and forgotten: the conversation goes on without it.
    """
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    timeout = httpx.Timeout(None, connect=CONNECT_S)  # an answer takes as long as it takes
    client = httpx.Client(
        base_url=config.url, headers=headers, timeout=timeout, transport=transport, trust_env=False
    )
    with client:
        print(HINT, file=out)
        messages = _beginning(config)
        while True:
            try:
                text = read("\n> ").strip()
            except (EOFError, KeyboardInterrupt):
                print(file=out)
                return
            if text == "/exit":
                return
            if text == "/reset":
                messages = _beginning(config)
            elif text.startswith("/"):
                print(HINT, file=out)
            elif text:
                _turn(client, config, messages, text, out)


def _beginning(config: ChatConfig) -> list[dict[str, str]]:
    return [] if config.system is None else [{"role": "system", "content": config.system}]


def _turn(
    client: httpx.Client,
    config: ChatConfig,
    messages: list[dict[str, str]],
    text: str,
    out: TextIO,
) -> None:
    """Add the question and its answer to `messages`."""
    messages.append({"role": "user", "content": text})
    answer = ""
    try:
        for piece in _pieces(client, config, messages):
            answer += piece
            print(piece, end="", file=out, flush=True)
    except KeyboardInterrupt:
        print(" …", end="", file=out)  # what has come so far stays part of the conversation
    except ChatFailed as error:
        print(f"\n{error}" if answer else error, file=out)
        messages.pop()
        return
    print(file=out)
    messages.append({"role": "assistant", "content": answer})


def _pieces(
    client: httpx.Client, config: ChatConfig, messages: list[dict[str, str]]
) -> Iterator[str]:
    wanted = {
        "model": config.model,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
    }
    body: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    body |= {"messages": messages, "stream": True}
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ChatFailed(f"{response.status_code}: {_message(response)}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ChatFailed(event["error"]["message"])
                    yield event["choices"][0]["delta"].get("content") or ""
    except httpx.HTTPError as error:
        raise ChatFailed(f"{config.url}: {error or type(error).__name__}") from error


def _message(response: httpx.Response) -> str:
    """What an error response says, be it from something else than hexserve."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
