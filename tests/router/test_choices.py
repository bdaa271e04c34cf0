"""Several prompts and several choices of each: their numbers, seeds, usage, streams and ends."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

import pytest

from router import choices
from router.errors import GenerationFailed
from router.output import Piece
from tests.router.conftest import Client
from tests.router.fakes import Call, Pause, ScriptedGenerator, batches
from tests.router.test_bad_input import check_error


def by_choice(events: list[Any]) -> list[str]:
    """The text of each completion choice of a stream, in order."""
    assert events[-1] == "[DONE]"
    texts: dict[int, str] = defaultdict(str)
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return [texts[number] for number in sorted(texts)]


def check_siblings(calls: list[Call], candidates: int) -> None:
    """The choices of a prompt have each other, and nobody else."""
    groups = [call.siblings for call in calls]
    assert groups == [each for each in groups[::candidates] for _ in range(candidates)]
    assert len(set(groups)) == len(groups) // candidates
    assert len({each.group for each in groups[::candidates] if each}) == len(groups) // candidates


async def test_each_prompt_has_n_choices_in_order(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = lambda prompt: [prompt, [256]]
    body: dict[str, Any] = {"prompt": ["ab", "c", "def"], "n": 2, "seed": 7}
    answer = await client.complete(**body)
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    expected = ["ab", "ab", "c", "c", "def", "def"]
    assert [c["text"] for c in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 12 + 6
    assert [call.choice for call in generator.calls] == [0, 1] * 3
    assert {call.sampling.seed for call in generator.calls} == {7}
    check_siblings(generator.calls, 2)
    assert by_choice(await client.stream_completion(**body)) == expected


async def test_cached_tokens_are_those_that_no_choice_has_computed(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("xy")
    generator.cached_tokens = lambda call: len(call.prompt) // 2 * 2
    answer = await client.complete(prompt=["abcd", "xyz", "u"], n=2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4 + 2}
    generator.cached_tokens = lambda call: 2 * call.choice  # the first one has computed it for all
    body: dict[str, Any] = {"prompt": "abcd", "n": 3, "stream_options": {"include_usage": True}}
    *_, usage, done = await client.stream_completion(**body)
    assert done == "[DONE]"
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("prompt", [["ab", [99]], [[97, 98], [99]], ["ab", "c"]])
async def test_prompts_are_texts_or_token_ids(
    client: Client, generator: ScriptedGenerator, prompt: list[Any]
) -> None:
    generator.script = batches("x")
    answer = await client.complete(prompt=prompt, return_token_ids=True)
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [[97, 98], [99]]
    events = await client.stream_completion(prompt=prompt, return_token_ids=True)
    told = {
        choice["index"]: choice["prompt_token_ids"]
        for event in events[:-1]
        for choice in event["choices"]
        if "prompt_token_ids" in choice
    }
    assert told == {0: [97, 98], 1: [99]}


async def test_an_absent_seed_differs_between_prompts_and_not_between_choices(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x")
    await client.complete(prompt=["a", "a"], n=2)
    seeds = [call.sampling.seed for call in generator.calls]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


async def test_a_chat_has_n_choices(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("Hi")
    answer = await client.chat(n=3)
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [
        (0, "Hi"),
        (1, "Hi"),
        (2, "Hi"),
    ]
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["prompt_tokens"] == len(generator.calls[0].prompt)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, done = await client.stream_chat(
        n=3, stream_options=options, return_token_ids=True
    )
    assert done == "[DONE]"
    assert last["usage"] == chunks[-1]["usage"] == answer["usage"]
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 1
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


async def test_choices_come_as_they_are_ready(client: Client, generator: ScriptedGenerator) -> None:
    pause = Pause()

    def script(prompt: list[int]) -> Any:
        if prompt == [*b"slow"]:
            yield pause
        yield prompt
        pause.event.set()

    generator.script = script
    events = await client.stream_completion(prompt=["slow", "fast"])
    assert events[0]["choices"][0]["index"] == 1
    assert by_choice(events) == ["slow", "fast"]


@pytest.mark.parametrize("prompt", ["Once é", [79, 110, 99, 101, 32, 0xC3, 0xA9]])
async def test_echo_puts_the_prompt_first(
    client: Client, generator: ScriptedGenerator, prompt: Any
) -> None:
    generator.script = batches("Hello", 2)
    answer = await client.complete(prompt=[prompt], n=2, echo=True, stop="é", max_tokens=20)
    assert [c["text"] for c in answer["choices"]] == ["Once éHello"] * 2
    events = await client.stream_completion(
        prompt=[prompt], n=2, echo=True, stop="é", max_tokens=20
    )
    assert by_choice(events) == ["Once éHello"] * 2


async def test_best_of_keeps_the_likeliest_first(
    client: Client, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator.script = lambda prompt: [[len(generator.calls) + 96], [256]]
    scores = {"a": -3.0, "b": -1.0, "c": -0.5, "d": -2.0}
    monkeypatch.setattr(choices, "_mean_logprob", lambda output: scores[output.text])
    answer = await client.complete(n=2, best_of=4)
    assert [c["text"] for c in answer["choices"]] == ["c", "b"]
    assert all(c["logprobs"] is None for c in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 8
    assert {call.sampling.top_logprobs for call in generator.calls} == {0}
    check_siblings(generator.calls, 4)


async def test_one_failure_ends_all_choices(client: Client, generator: ScriptedGenerator) -> None:
    def script(prompt: list[int]) -> Any:
        yield [97]
        if prompt == [*b"bad"]:
            raise GenerationFailed("lost")
        yield Pause()

    generator.script = script
    body = {"prompt": ["good", "bad", "good"], "max_tokens": 4}
    check_error(await asyncio.wait_for(client.post("/v1/completions", body), 5), 500, "lost")
    assert all(call.closed.is_set() for call in generator.calls)
    *_, last = await asyncio.wait_for(client.stream_completion(**body), 5)
    assert last["error"]["message"] == "lost"
    assert all(call.closed.is_set() for call in generator.calls)


async def test_a_long_list_goes_to_the_workers_bit_by_bit(
    client: Client, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "MAX_AT_ONCE", 3)
    running: list[int] = []

    def script(prompt: list[int]) -> Any:
        running.append(sum(not call.closed.is_set() for call in generator.calls))
        yield from [[97]] * 20  # each a turn, and every turn one more may start
        yield [256]

    generator.script = script
    answer = await client.complete(prompt=["p"] * 10)
    assert len(answer["choices"]) == 10
    assert max(running) == 3


async def test_a_request_runs_until_its_last_choice_has_ended(
    client: Client, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "MAX_AT_ONCE", 1)
    running, happened = client.context.running, list[str]()

    async def tell_idle() -> None:
        await running.wait_until_idle()
        happened.append("idle")

    watching: list[asyncio.Task[None]] = []

    def script(prompt: list[int]) -> Any:
        happened.append(bytes(prompt).decode())
        if not watching:
            watching.append(asyncio.create_task(tell_idle()))
        yield from [[97], [256]]

    generator.script = script
    await client.complete(prompt=["a", "b", "c"])
    assert len(running) == 0
    await watching[0]
    assert happened == ["a", "b", "c", "idle"]


async def test_a_conversation_with_tools_reaches_the_template(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    await client.chat(
        messages=[
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "t"}]},
        ]
    )
    calls: list[Call] = generator.calls
    text = bytes(token for token in calls[0].prompt if token < 256).decode()
    assert text == 'user\nu\nassistant\nf{"a": 1}\ntool\nt\nassistant\n'


class EndlessSequence:
    """Pieces for as long as somebody takes them; `taken` of them were."""

    taken = 0

    def counted(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def pieces(self, number: int) -> AsyncGenerator[tuple[int, Piece], None]:
        while True:
            self.taken += 1
            yield number, Piece(text="x")
            await asyncio.sleep(0)


async def test_what_no_client_reads_stays_with_the_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "MAX_PIECES_AHEAD", 4)
    sequences = [EndlessSequence(), EndlessSequence()]
    merged = choices.Choices(sequences, n=2, candidates=2).pieces()  # type: ignore[arg-type]
    async with asyncio.timeout(5), aclosing(merged):
        await anext(merged)
        for _ in range(50):  # turns of the loop, in each of which both could go on
            await asyncio.sleep(0)
        assert sum(sequence.taken for sequence in sequences) <= 1 + 4 + len(sequences)
        for _ in range(20):
            await anext(merged)


async def test_later_choices_are_told_that_the_request_has_begun(
    client: Client, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "MAX_AT_ONCE", 1)
    generator.script = batches("Hi")
    await client.complete(n=3)
    assert [call.late for call in generator.calls] == [False, True, True]


async def test_a_prompt_of_a_list_that_is_done_counts_as_begun(
    client: Client, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts alone no token comes; the others wait for room nevertheless."""
    monkeypatch.setattr(choices, "MAX_AT_ONCE", 1)
    generator.script = batches("x", 1)
    await client.complete(prompt=["a", "b"], echo=True, max_tokens=0)
    assert [call.late for call in generator.calls] == [False, True]
