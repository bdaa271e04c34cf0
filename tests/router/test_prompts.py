"""Where a prompt is tokenized: on the loop if that is quick, else on a thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from router.prompts import message_tokens

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "x" * 9000}}}


@pytest.mark.parametrize(
    ("message", "on_loop"),
    [
        ({"role": "user", "content": "short"}, True),
        ({"role": "user", "content": "x" * 9000}, False),
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, False),
    ],
)
async def test_a_long_conversation_is_written_on_a_thread(
    message: dict[str, Any], on_loop: bool
) -> None:
    threads = list[int]()

    def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        threads.append(threading.get_ident())
        return "text"

    context: Any = SimpleNamespace(
        require_chat_template=lambda: SimpleNamespace(render=render),
        tokenizer=SimpleNamespace(encode=lambda text, add_special_tokens: [1]),
    )
    assert await message_tokens(context, [message]) == [1]
    assert (threads == [threading.get_ident()]) is on_loop
