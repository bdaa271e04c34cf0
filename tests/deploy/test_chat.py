"""`hexserve chat` against a server that notes what it is asked."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deploy.chat import chat
from settings.config import ChatConfig
from tests.deploy.conftest import Launch
from tests.deploy.launch import HEXSERVE

CONFIG = ChatConfig("http://server", None, None, None, None, None)


class Server:
    """Streams an answer of two pieces, or what `answer` says instead."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.answer: httpx.Response | Exception | None = None
        self.error: str | None = None

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        number = len(self.requests)
        events: list[Any] = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": f"answer {number}"}}]},
            {"choices": [{"delta": {}}]},
        ]
        if self.error is not None:
            events.append({"error": {"message": self.error}})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return httpx.Response(200, text=text + "data: [DONE]\n\n")


@pytest.fixture
def server() -> Server:
    return Server()


def talk(server: Server, *lines: str, config: ChatConfig = CONFIG) -> str:
    left: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    out = io.StringIO()
    chat(config, read=read, out=out, transport=httpx.MockTransport(server))
    return out.getvalue()


def test_a_conversation_is_sent_whole_each_time(server: Server) -> None:
    shown = talk(server, "one", "  ", " two ")
    assert "answer 1\n" in shown
    assert "answer 2\n" in shown
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "one"}],
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "answer 1"},
            {"role": "user", "content": "two"},
        ],
    ]
    assert all(set(body) == {"messages", "stream"} for body in server.bodies)
    assert "authorization" not in server.requests[0].headers


def test_what_is_configured_is_sent(server: Server) -> None:
    config = ChatConfig("http://server", "m", "Be brief.", 5, 0.0, "key")
    talk(server, "one", "/reset", "two", config=config)
    first, second = server.bodies
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("m", 5, 0.0)
    assert server.requests[0].headers["authorization"] == "Bearer key"
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two"},
    ]


def test_commands(server: Server) -> None:
    shown = talk(server, "/help", "/exit", "never asked")
    assert shown.count("/reset begins anew") == 2
    assert server.requests == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "400: too long"),
        (httpx.Response(502, text="<html>bad gateway"), "502: <html>bad gateway"),
        (httpx.Response(500, json=["?"]), "500: "),
        (httpx.ConnectError("refused"), "http://server: refused"),
    ],
)
def test_a_failed_question_is_told_and_forgotten(
    server: Server, answer: httpx.Response | Exception, message: str
) -> None:
    server.answer = answer

    lines: Iterator[str] = iter(("one", "two"))

    def heal(prompt: str) -> str:
        if server.requests:
            server.answer = None
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    out = io.StringIO()
    chat(CONFIG, read=heal, out=out, transport=httpx.MockTransport(server))
    assert message in out.getvalue()
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "two"}]


def test_an_error_inside_an_answer_is_told(server: Server) -> None:
    server.error = "lost"
    assert "answer 1\nlost" in talk(server, "one")


def test_interrupting_at_the_prompt_ends(server: Server) -> None:
    def read(prompt: str) -> str:
        raise KeyboardInterrupt

    chat(
        CONFIG,
        read=read,
        out=io.StringIO(),
        transport=httpx.MockTransport(server),
    )
    assert server.requests == []


def test_a_conversation_with_a_deployment(launch: Launch) -> None:
    """The command by a pipe: answers come piece by piece, and each question knows those before."""
    server = launch(*HEXSERVE, "serve", "--model=fake", "--port=0", "--disagg_topo=1,1")
    url = server.ready_url()
    flags = ("--max_tokens=12", "--temperature=0", "--system=Be brief.")
    with subprocess.Popen(
        (*HEXSERVE, "chat", f"--url={url}", *flags),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as talk:
        shown, _ = talk.communicate("one\ntwo\n/reset\none\n/exit\nnever asked\n", timeout=60)
    assert talk.returncode == 0
    hint, *answers = shown.split("\n> ")
    assert hint.startswith("Ask something")
    first, second, _, again, _ = answers
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert first == again == f"{asked(url, messages)}\n"
    messages += [
        {"role": "assistant", "content": first.removesuffix("\n")},
        {"role": "user", "content": "two"},
    ]
    assert second == f"{asked(url, messages)}\n"


def asked(url: str, messages: list[dict[str, str]]) -> str:
    """The answer to a conversation, whole."""
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30, trust_env=False)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def test_the_command(launch: Launch) -> None:
    shown = launch(*HEXSERVE, "chat")  # standard input is empty
    assert shown.exit_code() == 0
    assert "/reset begins anew" in shown.output
    shown = launch(*HEXSERVE, "chat", "--url=h:1")
    assert shown.exit_code() == 2
    assert "hexserve: --url=h:1: a URL begins with" in shown.output
    assert "Traceback" not in shown.output
