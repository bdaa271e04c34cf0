"""The answers' JSON: completion and chat, whole and in chunks."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from checkpoint.tokenizer import Tokenizer
from router.logprobs import chat_logprobs, completion_logprobs
from router.output import Piece

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

DONE_EVENT = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """A server-sent event that carries a value as JSON."""
    return f"data: {_encode(value)}\n\n".encode()


class Answer(ABC):
    """One request's answer.

    A chunk's constant parts are encoded once; each event encodes only its choice.

    Args:
        public_id: the answer's id, without the kind's prefix.
        model: the served model's name.
        prompt: the prompt's token ids, to be told where `return_token_ids`.
        logprobs, return_token_ids: whether choices tell them.
        usage_in_chunks: chunks have a `usage`, null but where it is given.
    """

    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        public_id: str,
        model: str,
        prompt: Sequence[int],
        logprobs: bool,
        return_token_ids: bool,
        usage_in_chunks: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._logprobs = logprobs
        self._return_token_ids = return_token_ids
        self._usage_in_chunks = usage_in_chunks
        self._id = self.id_prefix + public_id
        self._model = model
        self._created = int(time.time())
        self._chunk_head = "data: " + _encode(self._head(self.chunk_kind))[:-1] + ',"choices":['

    def whole(self, piece: Piece, usage: dict[str, object]) -> dict[str, Any]:
        """The answer as one object."""
        return {
            **self._head(self.kind),
            "choices": [self._whole_choice(piece)],
            "usage": usage,
            **self._whole_extras(),
        }

    @abstractmethod
    def first_events(self, piece: Piece, usage: dict[str, object] | None) -> bytes:
        """The events of a stream's first piece."""

    def piece_event(self, piece: Piece, usage: dict[str, object] | None) -> bytes:
        """The event of a further piece."""
        return self._chunk(self._chunk_choice(piece), usage)

    def usage_event(self, usage: dict[str, object]) -> bytes:
        """The event without choices that ends a stream whose usage was asked for."""
        return f'{self._chunk_head}],"usage":{_encode(usage)}}}\n\n'.encode()

    @abstractmethod
    def _whole_choice(self, piece: Piece) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, piece: Piece) -> dict[str, Any]: ...

    def _whole_extras(self) -> dict[str, Any]:
        return {}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(
        self, choice: dict[str, Any], usage: dict[str, object] | None, extras: str = ""
    ) -> bytes:
        tail = ""
        if self._usage_in_chunks:
            tail = f',"usage":{_encode(usage)}'
        return f"{self._chunk_head}{_encode(choice)}]{tail}{extras}}}\n\n".encode()


class CompletionAnswer(Answer):
    """The answer of `/v1/completions`. Prompt token ids stand in the choice."""

    id_prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def first_events(self, piece: Piece, usage: dict[str, object] | None) -> bytes:
        """One event; it tells the prompt's token ids."""
        return self._chunk(self._with_prompt(self._chunk_choice(piece)), usage)

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        return self._with_prompt(self._chunk_choice(piece))

    def _chunk_choice(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": piece.text,
            "logprobs": completion_logprobs(self._tokenizer, piece.scored)
            if self._logprobs
            else None,
            "finish_reason": piece.finish,
        }
        if self._return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _with_prompt(self, choice: dict[str, Any]) -> dict[str, Any]:
        if self._return_token_ids:
            choice["prompt_token_ids"] = self._prompt
        return choice


class ChatAnswer(Answer):
    """The answer of `/v1/chat/completions`. Prompt token ids stand beside the choices."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first_events(self, piece: Piece, usage: dict[str, object] | None) -> bytes:
        """A chunk that tells the role, with the prompt's token ids, and the piece's."""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
        extras = ""
        if self._return_token_ids:
            extras = f',"prompt_token_ids":{_encode(self._prompt)}'
        return self._chunk(choice, None, extras) + self.piece_event(piece, usage)

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice("message", message, piece)

    def _chunk_choice(self, piece: Piece) -> dict[str, Any]:
        return self._choice("delta", {"content": piece.text} if piece.text else {}, piece)

    def _choice(self, name: str, content: dict[str, Any], piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            name: content,
            "logprobs": chat_logprobs(self._tokenizer, piece.scored) if self._logprobs else None,
            "finish_reason": piece.finish,
        }
        if self._return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice

    def _whole_extras(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt} if self._return_token_ids else {}
