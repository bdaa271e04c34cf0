from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.tokenizer import Tokenizer
from engine.types import AttemptId, FinishReason, SequenceId, TokenDelta
from router.errors import GenerationFailed
from router.output import OutputAssembler, join
from tests.router.conftest import Client
from tests.router.fakes import EOS, LIMITS, MAX_MODEL_LEN, ScriptedGenerator, batches

SEQUENCE = SequenceId(AttemptId("r", 0), 0)

TEXTS = [
    "plain",
    "👩‍👩‍👧‍👦 family, 🇯🇵 flag, 👍🏽",
    "漢字かな交じり文 한국어",
    "e\u0301a\u0308n\u0303 Z͑ͫ̓ͪ̂ͫ̽",
    'tab\tnl\nquote" back\\slash \x00 \u2028',
]


def joined(events: list) -> str:
    assert events[-1] == "[DONE]"
    return "".join(e["choices"][0]["text"] for e in events[:-1] if e["choices"])


async def test_a_completion_has_what_strict_clients_require(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("Hello")
    answer = await client.complete(model="org/model", prompt="abc")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "org/model"
    assert isinstance(answer["created"], int)
    assert answer["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert generator.calls[0].prompt == [*b"abc"]


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (100,)])
@pytest.mark.parametrize("text", TEXTS)
async def test_streamed_is_what_whole_is(
    client: Client, generator: ScriptedGenerator, text: str, sizes: tuple[int, ...]
) -> None:
    generator.limits = replace(LIMITS, max_model_len=1000)
    generator.script = batches(text, *sizes)
    whole = await client.complete(max_tokens=500)
    assert whole["choices"][0]["text"] == text
    events = await client.stream_completion(max_tokens=500)
    assert joined(events) == text
    for event in events[:-2]:
        assert event["choices"][0]["text"] != ""
        assert event["choices"][0]["finish_reason"] is None
        assert "\ufffd" not in event["choices"][0]["text"]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_character_cut_off_at_the_end_is_replaced_in_both(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = [[97, *"👍".encode()[:2]]]
    whole = await client.complete()
    assert whole["choices"][0]["text"] == "a\ufffd"
    assert joined(await client.stream_completion()) == "a\ufffd"


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_max_tokens_ends_with_length(
    client: Client, generator: ScriptedGenerator, max_tokens: int
) -> None:
    generator.script = batches("Hello", 2)
    answer = await client.complete(max_tokens=max_tokens)
    assert answer["choices"][0]["text"] == "Hello"[:max_tokens]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens


async def test_max_tokens_defaults_to_16_or_the_room_left(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x" * 30)
    await client.post("/v1/completions", {"prompt": "abc"})
    await client.post("/v1/completions", {"prompt": "p" * (MAX_MODEL_LEN - 5)})
    assert [call.sampling.max_tokens for call in generator.calls] == [16, 5]


async def test_a_prompt_that_leaves_room_for_one_token_is_served(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("x")
    answer = await client.complete(prompt=[1] * (MAX_MODEL_LEN - 1), max_tokens=1)
    assert answer["choices"][0] == {
        "index": 0,
        "text": "x",
        "logprobs": None,
        "finish_reason": "length",
    }


async def test_first_token_eos_gives_an_empty_text(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = [[EOS]]
    answer = await client.complete(return_token_ids=True)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("", "stop", [EOS])
    assert answer["usage"]["completion_tokens"] == 1
    events = await client.stream_completion()
    assert len(events) == 2
    assert events[0]["choices"][0]["finish_reason"] == "stop"


async def test_ignored_eos_goes_on(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = [[97, EOS, 98]]
    answer = await client.complete(ignore_eos=True)
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert generator.calls[0].sampling.stop_token_ids == frozenset()
    answer = await client.complete(ignore_eos=True, skip_special_tokens=False)
    assert answer["choices"][0]["text"] == "a<|eos|>b"


async def test_a_stop_token_has_no_text_but_counts(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = [[*b"abc"]]
    for skip in (True, False):
        answer = await client.complete(
            stop_token_ids=[98], skip_special_tokens=skip, return_token_ids=True
        )
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
        assert choice["token_ids"] == [97, 98]
        assert answer["usage"]["completion_tokens"] == 2
    assert generator.calls[0].sampling.stop_token_ids == {98, EOS}


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("lo w", "Hel"),
        (["world", "o"], "Hell"),
        (["He"], ""),
        (["nothing", "never"], "Hello world"),
        ("dx", "Hello world"),
        ("wörld", "Hello world"),
    ],
)
@pytest.mark.parametrize("sizes", [(1,), (3,), (100,)])
async def test_stop_strings(
    client: Client,
    generator: ScriptedGenerator,
    stop: str | list[str],
    text: str,
    sizes: tuple[int, ...],
) -> None:
    generator.script = batches("Hello world", *sizes)
    answer = await client.complete(stop=stop)
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert joined(await client.stream_completion(stop=stop)) == text
    for call in generator.calls:
        assert call.closed.is_set()


@pytest.mark.parametrize(
    ("stop", "least", "text"),
    [
        ("l", 2, "He"),
        ("l", 3, "Hel"),
        ("ll", 2, "He"),
        ("ll", 3, "Hello world"),
        ("o", 5, "Hello w"),
        ("d", 11, "Hello world"),
    ],
)
@pytest.mark.parametrize("sizes", [(1,), (3,), (100,)])
async def test_stop_strings_are_looked_for_after_min_tokens(
    client: Client,
    generator: ScriptedGenerator,
    stop: str,
    least: int,
    text: str,
    sizes: tuple[int, ...],
) -> None:
    generator.script = batches("Hello world", *sizes)
    asked = {"stop": stop, "min_tokens": least}
    answer = await client.complete(**asked)
    assert answer["choices"][0]["text"] == text
    assert joined(await client.stream_completion(**asked)) == text


async def test_a_stop_string_ends_the_generation_and_the_count(
    client: Client, generator: ScriptedGenerator
) -> None:
    generator.script = batches("one. two. three", 2)
    answer = await client.complete(stop=".", return_token_ids=True, logprobs=0)
    choice = answer["choices"][0]
    assert choice["token_ids"] == [*b"one."]
    assert choice["logprobs"]["tokens"] == ["o", "n", "e", "."]
    assert answer["usage"]["completion_tokens"] == 4
    assert not generator.calls[0].finished
    assert generator.calls[0].closed.is_set()


async def test_usage_only_where_asked_for(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("Hello", 2)
    plain = await client.stream_completion()
    assert all("usage" not in event for event in plain[:-1])
    *chunks, last, done = await client.stream_completion(stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == (await client.complete())["usage"]
    *chunks, last, done = await client.stream_completion(
        stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 4, 6]
    assert last["usage"]["completion_tokens"] == 6


async def test_token_ids_where_asked_for(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("a👍b", 1)
    whole = await client.complete(prompt=[1, 2, 3], return_token_ids=True)
    choice = whole["choices"][0]
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert choice["token_ids"] == [*"a👍b".encode(), EOS]
    events = (await client.stream_completion(prompt=[1, 2, 3], return_token_ids=True))[:-1]
    assert [e["choices"][0].get("prompt_token_ids") for e in events] == [[1, 2, 3], *[None] * 3]
    ids = [e["choices"][0]["token_ids"] for e in events]
    assert ids == [[97], [*"👍".encode()], [98], [EOS]]


async def test_logprobs(client: Client, generator: ScriptedGenerator) -> None:
    generator.script = batches("añb", 2)
    whole = (await client.complete(logprobs=2))["choices"][0]["logprobs"]
    assert whole["tokens"] == ["a", "\ufffd", "\ufffd", "b", "<|eos|>"]
    assert whole["token_logprobs"] == [-0.5] * 5
    assert whole["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert whole["text_offset"] == [0, 1, 1, 2, 3]
    parts = [e["choices"][0]["logprobs"] for e in (await client.stream_completion(logprobs=2))[:-1]]
    for name, values in whole.items():
        assert [value for part in parts for value in part[name]] == values
    chosen_alone = (await client.complete(logprobs=0))["choices"][0]["logprobs"]
    assert chosen_alone["top_logprobs"][0] == {"a": -0.5}
    assert generator.calls[-1].sampling.top_logprobs == 0


async def test_missing_logprobs_are_an_error(tokenizer: Tokenizer) -> None:
    assembler = OutputAssembler(tokenizer.detokenizer(), stops=(), stop_token_ids=(), logprobs=True)
    with pytest.raises(GenerationFailed, match="output token 3"):
        assembler.push(TokenDelta(SEQUENCE, 3, (1,)))


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text("aé漢👍\u0301", min_size=1, max_size=8))
    stops = data.draw(st.lists(st.text("aé漢👍", min_size=1, max_size=2), max_size=3))
    tokens = [*text.encode()][: data.draw(st.integers(1, 32))]

    def run(cuts: list[int]) -> tuple[str, list[int], str | None]:
        assembler = OutputAssembler(
            tokenizer.detokenizer(), stops=stops, stop_token_ids=(), logprobs=False
        )
        pieces = []
        bounds = [0, *cuts, len(tokens)]
        for start, end in pairwise(bounds):
            last = FinishReason.LENGTH if end == len(tokens) else None
            delta = TokenDelta(SEQUENCE, start, tuple(tokens[start:end]), finish=last)
            piece = assembler.push(delta)
            if piece is not None:
                pieces.append(piece)
                if piece.finish is not None:
                    break
        whole = join(pieces)
        return whole.text, whole.tokens, whole.finish

    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1)))) if len(tokens) > 1 else []
    result = run(cuts)
    assert result == run([])
    if result[2] == "length":
        assert result[0] == tokenizer.decode(tokens)
        assert result[1] == tokens
