"""The answer of `/v1/responses`, whole and as typed events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from checkpoint.tokenizer import Tokenizer
from router.answers import encode_json
from router.errors import ServingError
from router.logprobs import chat_logprobs
from router.output import Piece, ScoredToken, join
from router.response_request import ResponseRequest


class ResponseAnswer:
    """One response: one message with one part of text.

    Streamed, it collects its pieces, as the last events repeat all of them.
    """

    usage_in_pieces = False

    def __init__(self, tokenizer: Tokenizer, request: ResponseRequest, answer_id: str) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._id = f"resp_{answer_id}"
        self._item_id = f"msg_{answer_id}"
        self._created = int(time.time())
        self._events = 0
        self._pieces: list[Piece] = []

    def whole(self, outputs: Sequence[Piece], usage: dict[str, object]) -> dict[str, Any]:
        """The response; `outputs` is its one."""
        (output,) = outputs
        cut = output.finish == "length"
        status = "incomplete" if cut else "completed"
        return self._response(
            status,
            [self._message(status, [self._part(output)])],
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            completed_at=None if cut else int(time.time()),
            usage=_usage(usage),
        )

    # ---- a stream; see router.event_stream.StreamedAnswer ----

    def first_events(self, number: int, piece: Piece, usage: dict[str, object] | None) -> bytes:
        response = self._response("in_progress", [])
        item = self._message("in_progress", [])
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._text_event("response.content_part.added", part=self._part(Piece())),
                self.piece_event(number, piece, usage),
            )
        )

    def piece_event(self, number: int, piece: Piece, usage: dict[str, object] | None) -> bytes:
        self._pieces.append(piece)
        return self._text_event(
            "response.output_text.delta", delta=piece.text, logprobs=self._logprobs(piece.scored)
        )

    def last_events(self, usage: dict[str, object]) -> bytes:
        output = join(self._pieces)
        response = self.whole([output], usage)
        part, item = self._part(output), response["output"][0]
        done = self._text_event(
            "response.output_text.done", text=output.text, logprobs=part["logprobs"]
        )
        return b"".join(
            (
                done,
                self._text_event("response.content_part.done", part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{response['status']}", response=response),
            )
        )

    def error_event(self, error: ServingError) -> bytes:
        """OpenAI's `error` event, which holds the object that other streams end with as well."""
        body = error.body()
        return self._event("error", **{**body["error"], **body, "type": "error"})

    # ---- parts ----

    def _event(self, kind: str, **values: Any) -> bytes:
        data = {**values, "type": kind, "sequence_number": self._events}
        self._events += 1
        return f"event: {kind}\ndata: {encode_json(data)}\n\n".encode()

    def _text_event(self, kind: str, **values: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **values)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self, output: Piece) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": output.text,
            "annotations": [],
            "logprobs": self._logprobs(output.scored),
        }

    def _logprobs(self, scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        if not self._request.options.tells_logprobs:
            return []
        return cast("list[dict[str, Any]]", chat_logprobs(self._tokenizer, scored)["content"])

    def _response(
        self, status: str, output: list[dict[str, Any]], **changes: Any
    ) -> dict[str, Any]:
        options = self._request.options
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": options.model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "usage": None,
            "temperature": options.sampling.temperature,
            "top_p": options.sampling.top_p,
            "top_logprobs": options.sampling.top_logprobs or 0,
            "text": {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "background": False,
            "truncation": "disabled",
            **self._request.echoed,
            **changes,
        }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """A completion's usage by the names that responses have for it."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
