"""A worker process dies in each phase of a request: the very answers of an undisturbed run."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.conftest import Launch, give_weights
from tests.deploy.launch import HEXSERVE, Launched, get, kill, wait_until

CONTEXT = 2048
TOKENS = 600
"""So many that a request takes the tiny model long enough for what happens meanwhile."""
PROMPT = [(7 * i + 3) % 64 for i in range(40)]
COMMON = {
    "prompt": PROMPT,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "return_token_ids": True,
    "logprobs": 2,
}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 2**63 + 5}
PENALIZED = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1}


@dataclass
class Answer:
    """What a client was told, whether piece by piece or whole."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scored: list[tuple[str, int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    usage: Any = None
    error: Any = None

    def take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.tokens += choice["token_ids"]
            self.finish = choice["finish_reason"] or self.finish
            scores = choice["logprobs"] or {"tokens": [], "text_offset": [], "token_logprobs": []}
            self.scored += zip(scores["tokens"], scores["text_offset"], strict=True)
            self.logprobs += scores["token_logprobs"]


class Asking:
    """One request on a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.answer = Answer()
        self._url, self._body = url, body
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=self._body, timeout=60, trust_env=False) as answer:
            if not self._body.get("stream"):
                self.answer.take(json.loads(answer.read()))
                return
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.answer.take(json.loads(line[6:]))

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> Answer:
        self._thread.join(60)
        assert not self.running
        return self.answer


class Scene:
    """A deployment of one worker per role, and what it answers when nothing disturbs it."""

    def __init__(self, launcher: Launched) -> None:
        self.launcher = launcher
        self.url = launcher.ready_url()
        whole = Asking(self.url, {**COMMON, **SAMPLED}).end()
        stop = whole.text[len(whole.text) // 2 :][:5]  # split between tokens, and by what happens
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        self.bodies: list[dict[str, Any]] = [
            {**COMMON, **streamed, "temperature": 0},
            {**COMMON, **streamed, **SAMPLED, **PENALIZED},
            {**COMMON, **SAMPLED, "stop": [stop]},
        ]
        self.undisturbed = [Asking(self.url, body).end() for body in self.bodies]
        assert [answer.finish for answer in self.undisturbed] == ["length", "length", "stop"]
        assert self.undisturbed[0].usage["completion_tokens"] == TOKENS

    def pid(self, name: str) -> int:
        (*_, line) = [each for each in self.launcher.lines if f"{name}: process " in each]
        return int(line.split("process ")[1].split()[0])

    def ask(self) -> list[Asking]:
        return [Asking(self.url, body) for body in self.bodies]

    def blocks(self, name: str) -> dict[str, int]:
        workers = get(self.url, "/health").json()["workers"]
        (found,) = [w.get("blocks", {}) for w in workers if w["address"].endswith(f"/{name}.sock")]
        return found

    def all_free(self, name: str) -> bool:
        blocks = self.blocks(name)
        return blocks["free"] + blocks["cached"] == blocks["total"]

    def until_ready(self) -> None:
        wait_until(lambda: get(self.url, "/ping").status_code == 200, "all are ready")


def dies_while_they_are_queued(scene: Scene) -> list[Asking]:
    """The prefill worker has not read the orders."""
    victim = scene.pid("prefill-0")
    kill(victim, signal.SIGSTOP)
    asking = scene.ask()
    wait_until(lambda: get(scene.url, "/health").json()["requests"] == 3, "they are sent")
    kill(victim)
    return asking


def dies_between_the_first_token_and_its_first_step(scene: Scene) -> list[Asking]:
    """The decode worker has not fetched the KV, which is there; clients have a token."""
    victim = scene.pid("decode-0")
    kill(victim, signal.SIGSTOP)
    asking = scene.ask()
    wait_until(lambda: all(a.answer.tokens for a in asking[:2]), "the first tokens")
    kill(victim)
    assert [len(a.answer.tokens) for a in asking[:2]] == [1, 1]
    return asking


def dies_before_its_kv_is_fetched(scene: Scene) -> list[Asking]:
    reader = scene.pid("decode-0")
    kill(reader, signal.SIGSTOP)
    asking = scene.ask()
    wait_until(lambda: scene.blocks("prefill-0").get("exported"), "KV waits")
    kill(scene.pid("prefill-0"))
    kill(reader, signal.SIGCONT)
    return asking


def dies_while_it_decodes(scene: Scene) -> list[Asking]:
    asking = scene.ask()
    wait_until(lambda: all(len(a.answer.tokens) > 20 for a in asking[:2]), "some tokens")
    kill(scene.pid("decode-0"))
    assert any(a.running for a in asking)
    return asking


def test_the_answers_are_those_of_an_undisturbed_run(launch: Launch, fake_folder: Path) -> None:
    folder = give_weights(fake_folder, "head_dim")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    flags = f"--model={folder}", "--disagg_topo=1,1", "--port=0", "--restart_wait_s=0.05"
    scene = Scene(launch(*HEXSERVE, "serve", *flags))
    phases: list[Callable[[Scene], list[Asking]]] = [
        dies_while_they_are_queued,
        dies_between_the_first_token_and_its_first_step,
        dies_before_its_kv_is_fetched,
        dies_while_it_decodes,
    ]
    for phase in phases:
        scene.until_ready()
        answers = [asking.end() for asking in phase(scene)]
        for answer, undisturbed in zip(answers, scene.undisturbed, strict=True):
            where = f"{phase.__name__}: {answer.error}"
            assert answer.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-4), where
            answer.logprobs = undisturbed.logprobs
            assert answer == undisturbed, where
    scene.until_ready()
    for name in ("prefill-0", "decode-0"):
        # A worker tells its load once a second: the last may be of a step before the end.
        wait_until(partial(scene.all_free, name), f"all blocks of {name} are free")
