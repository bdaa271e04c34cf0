"""The answers' JSON: completion and chat, whole and in chunks."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from checkpoint.tokenizer import Tokenizer
from router.errors import ServingError
from router.logprobs import chat_logprobs, completion_logprobs
from router.output import Piece
from router.sampling import RequestOptions

encode_text = encode_basestring
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

DONE_EVENT = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """A server-sent event that carries a value as JSON."""
    return f"data: {encode_json(value)}\n\n".encode()


class Answer(ABC):
    """One request's answer.

    A chunk's constant parts are encoded once; each event encodes only its choice, and mostly
    only the text of that.

    Args:
        options: the request's; they say whether choices tell log-probabilities and token ids,
            and chunks their usage, which is null but where it is given.
        answer_id: the answer's id, without the kind's prefix.
    """

    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, tokenizer: Tokenizer, options: RequestOptions, answer_id: str) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._id = self.id_prefix + answer_id
        self._created = int(time.time())
        self._chunk_head = "data: " + encode_json(self._head(self.chunk_kind))[:-1] + ',"choices":['
        self._tells_logprobs = options.tells_logprobs
        self._frames: dict[int, tuple[str, str, str]] = {}

    def whole(self, outputs: Sequence[Piece], usage: dict[str, object]) -> dict[str, Any]:
        """The answer as one object; `outputs` are the choices in order."""
        return {
            **self._head(self.kind),
            "choices": [self._whole_choice(*numbered) for numbered in enumerate(outputs)],
            "usage": usage,
            **self._whole_extras(),
        }

    # ---- a stream; see router.event_stream.StreamedAnswer ----

    @property
    def usage_in_pieces(self) -> bool:
        return self._options.continuous_usage

    @abstractmethod
    def first_events(self, number: int, piece: Piece, usage: dict[str, object] | None) -> bytes: ...

    def piece_event(self, number: int, piece: Piece, usage: dict[str, object] | None) -> bytes:
        if usage is not None or piece.finish is not None or self._tells_logprobs:
            return self._chunk(self._chunk_choice(number, piece), usage)
        frame = self._frames.get(number)
        if frame is None:
            frame = self._frames[number] = self._frame(number)
        tokens = ""
        if self._options.return_token_ids:
            ids = piece.tokens
            tokens = str(ids[0]) if len(ids) == 1 else ",".join(map(str, ids))
        return f"{frame[0]}{encode_text(piece.text)}{frame[1]}{tokens}{frame[2]}".encode()

    def _frame(self, number: int) -> tuple[str, str, str]:
        """What stands before the text, between text and token ids, and after both, in an event.

        Cut out of the event of a text and a token that nothing after them is like.
        """
        choice = self._chunk_choice(number, Piece(text="?", tokens=[-1]))
        head, _, rest = self._chunk(choice, None).decode().rpartition('"?"')
        middle, _, tail = rest.partition("-1")
        return (head, middle, tail) if self._options.return_token_ids else (head, "", rest)

    def last_events(self, usage: dict[str, object]) -> bytes:
        """An event without choices that tells the usage, where it was asked for, and the end."""
        if not self._options.include_usage:
            return DONE_EVENT
        return f'{self._chunk_head}],"usage":{encode_json(usage)}}}\n\n'.encode() + DONE_EVENT

    def error_event(self, error: ServingError) -> bytes:
        return event(error.body())

    # ---- parts ----

    @abstractmethod
    def _whole_choice(self, number: int, output: Piece) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, number: int, piece: Piece) -> dict[str, Any]: ...

    def _whole_extras(self) -> dict[str, Any]:
        return {}

    def _head(self, kind: str) -> dict[str, Any]:
        model = self._options.model
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def _chunk(
        self, choice: dict[str, Any], usage: dict[str, object] | None, extras: str = ""
    ) -> bytes:
        tail = ""
        if self._options.include_usage:
            tail = f',"usage":{encode_json(usage)}'
        return f"{self._chunk_head}{encode_json(choice)}]{tail}{extras}}}\n\n".encode()


class CompletionAnswer(Answer):
    """The answer of `/v1/completions`. Prompt token ids stand in the choice.

    Args:
        prompts: the token ids of each; every one has equally many choices.
        echo: the texts that their choices begin with, None for none.
    """

    id_prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: RequestOptions,
        answer_id: str,
        *,
        prompts: Sequence[Sequence[int]],
        echo: Sequence[str] | None,
    ) -> None:
        super().__init__(tokenizer, options, answer_id)
        self._prompts = prompts
        self._echo = echo

    def first_events(self, number: int, piece: Piece, usage: dict[str, object] | None) -> bytes:
        """One event; it tells the prompt, where that was asked for."""
        return self._chunk(self._whole_choice(number, piece), usage)

    def _whole_choice(self, number: int, output: Piece) -> dict[str, Any]:
        choice = self._chunk_choice(number, output)
        if output.echoed is not None:
            choice["logprobs"] = {
                name: [*values, *choice["logprobs"][name]] for name, values in output.echoed.items()
            }
        prompt = number // self._options.n
        if self._echo is not None:
            choice["text"] = self._echo[prompt] + choice["text"]
        if self._options.return_token_ids:
            choice["prompt_token_ids"] = list(self._prompts[prompt])
        return choice

    def _chunk_choice(self, number: int, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number,
            "text": piece.text,
            "logprobs": completion_logprobs(self._tokenizer, piece.scored, self._before(number))
            if self._options.tells_logprobs
            else None,
            "finish_reason": piece.finish,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _before(self, number: int) -> int:
        """Characters of a choice before its output."""
        return 0 if self._echo is None else len(self._echo[number // self._options.n])


class ChatAnswer(Answer):
    """The answer of `/v1/chat/completions`. Prompt token ids stand beside the choices."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: RequestOptions,
        answer_id: str,
        *,
        prompt: Sequence[int],
    ) -> None:
        super().__init__(tokenizer, options, answer_id)
        self._prompt = list(prompt)

    def first_events(self, number: int, piece: Piece, usage: dict[str, object] | None) -> bytes:
        """A chunk that tells the role, with the prompt's token ids, and the piece's."""
        choice = {
            "index": number,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
        extras = ""
        if self._options.return_token_ids and number == 0:
            extras = f',"prompt_token_ids":{encode_json(self._prompt)}'
        return self._chunk(choice, usage, extras) + self.piece_event(number, piece, usage)

    def _whole_choice(self, number: int, output: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return self._choice(number, "message", message, output)

    def _chunk_choice(self, number: int, piece: Piece) -> dict[str, Any]:
        return self._choice(number, "delta", {"content": piece.text} if piece.text else {}, piece)

    def _choice(
        self, number: int, name: str, content: dict[str, Any], piece: Piece
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number,
            name: content,
            "logprobs": chat_logprobs(self._tokenizer, piece.scored)
            if self._options.tells_logprobs
            else None,
            "finish_reason": piece.finish,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _whole_extras(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt} if self._options.return_token_ids else {}
