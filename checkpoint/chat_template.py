"""Renders chats into prompts with the model's own Jinja template.

Templates come with the model, so they run in jinja2's sandbox, with the size of what they
render bounded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoint.errors import ChatTemplateError, CheckpointError
from checkpoint.json_file import read_object

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
"""Has the special tokens of older models, where tokenizer_config.json does not name them."""

MAX_RENDERED_CHARS = 4 * 1024 * 1024
"""Longest prompt text a template may render."""

_DEFAULT = "default"
_WITH_TOOLS = "tool_use"


class ChatTemplate:
    """A compiled chat template. Made by `ChatTemplate.load`; safe to use from many threads."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compiles `sources` (name → template; one is named "default").

        `special_tokens` are variables for the templates, e.g. {"bos_token": "<s>"}.

        Raises:
            CheckpointError: a template has a syntax error.
        """
        environment = _SandboxWithLimits(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except (jinja2.TemplateError, RecursionError) as error:
                raise CheckpointError(f"the chat template {name!r} is broken: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """Loads a model folder's template, or returns None where the model has none.

        chat_template.jinja comes before tokenizer_config.json's `chat_template`, which is
        one template or a list of named ones.

        Raises:
            CheckpointError: a file is broken, or the template does not compile.
        """
        path = folder / TOKENIZER_CONFIG_FILE
        config = read_object(path) if path.is_file() else {}
        template_path = folder / TEMPLATE_FILE
        if template_path.is_file():
            try:
                sources = {_DEFAULT: template_path.read_text(encoding="utf-8")}
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{template_path}: cannot be read ({error})") from error
        elif config.get("chat_template") is not None:
            sources = _named_sources(config["chat_template"], path)
        else:
            return None
        older = folder / SPECIAL_TOKENS_FILE
        special = read_object(older) if older.is_file() else {}
        return cls(sources, _special_tokens(special) | _special_tokens(config))

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Returns the prompt text of a chat.

        `add_generation_prompt` ends it where the assistant's answer begins. `kwargs` are
        further variables for the template, e.g. `tools`; a model with a template of its own
        for tools has it used when they are given.

        Raises:
            ChatTemplateError: the template refused the messages, failed on them, or rendered
                more than MAX_RENDERED_CHARS.
        """
        name = _WITH_TOOLS if kwargs.get("tools") and _WITH_TOOLS in self._templates else _DEFAULT
        variables = {
            # Templates ask whether these are none, so they must be defined.
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._templates[name].generate(variables):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can fail in any way on a request's values
            message = str(error) or type(error).__name__
            raise ChatTemplateError(f"the chat template failed: {message}") from error
        return "".join(pieces)


def _named_sources(value: Any, path: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {_DEFAULT: value}
    sources: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                sources[name] = template
            case _:
                raise CheckpointError(
                    f"{path}: 'chat_template' must be a string or a list of objects with "
                    f"'name' and 'template'"
                )
    if _DEFAULT not in sources:
        raise CheckpointError(
            f"{path}: 'chat_template' has none named 'default' (only {', '.join(sources)})"
        )
    return sources


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Picks bos_token, eos_token and their like, written as a string or with options."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


class _SandboxWithLimits(ImmutableSandboxedEnvironment):
    """The sandbox, with what the operators + * ** make bounded.

    jinja2's sandbox bounds each `range` by itself. What remains to a malicious template is
    to waste time in nested loops, and memory in filters.
    """

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "+":
            _check_size(_length(left) + _length(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(other, int):
                    _check_size(_length(one) * other)
            _check_bits(_bits(left) + _bits(right))
        elif isinstance(right, int):
            _check_bits(_bits(left) * abs(right))
        return super().call_binop(context, operator, left, right)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARS:
        raise ChatTemplateError(
            f"the chat template renders more than {MAX_RENDERED_CHARS:,} characters"
        )


def _check_bits(bits: int) -> None:
    if bits > sys.maxsize.bit_length() * 2:
        raise ChatTemplateError("the chat template computes a number that is too large")


class _GenerationTag(jinja2.ext.Extension):
    """Accepts {% generation %}…{% endgeneration %}, which marks training targets; no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
