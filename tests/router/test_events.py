"""An event put together around a text is, byte for byte, the event encoded as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.tokenizer import Tokenizer
from engine.types import SamplingParams
from router.answers import Answer, ChatAnswer, CompletionAnswer
from router.output import Piece
from router.sampling import RequestOptions
from router.urgency import AskedUrgency

TEXTS = ("a", '"?"', "\\ \n\t\x00\x1f", "é 👍 \u2028", "?", "-1", '"token_ids":[-1]')


def options(**changes: Any) -> RequestOptions:
    fields: dict[str, Any] = {
        "model": 'm"?"', "sampling": SamplingParams(), "seed": None, "n": 2, "max_tokens": None,
        "max_tokens_param": "max_tokens", "min_tokens_param": "min_tokens",
        "default_max_tokens": None, "stops": (), "urgency": AskedUrgency(),
        "skip_special_tokens": True, "return_token_ids": False, "stream": True,
        "include_usage": False, "continuous_usage": False,
    }  # fmt: skip
    return RequestOptions(**fields | changes)


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("return_token_ids", [False, True])
@pytest.mark.parametrize("include_usage", [False, True])
def test_bytes(
    tokenizer: Tokenizer, kind: str, return_token_ids: bool, include_usage: bool
) -> None:
    wanted = options(return_token_ids=return_token_ids, include_usage=include_usage)
    answer: Answer = (
        ChatAnswer(tokenizer, wanted, 'id"?"-1', prompt=[1])
        if kind == "chat"
        else CompletionAnswer(tokenizer, wanted, 'id"?"-1', prompts=[[1]], echo=None)
    )
    for number in (0, 1, 0):
        for text in TEXTS:
            for tokens in ([97], [97, 0, 511]):
                piece = Piece(text=text, tokens=tokens)
                whole = answer._chunk(answer._chunk_choice(number, piece), None)
                assert answer.piece_event(number, piece, None) == whole
