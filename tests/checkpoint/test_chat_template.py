from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from checkpoint.chat_template import MAX_RENDERED_CHARS, ChatTemplate
from checkpoint.errors import ChatTemplateError, CheckpointError

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: Any = None, **kwargs: Any) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages or HELLO, **kwargs)


def write(folder: Path, **config: Any) -> Path:
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_fake_model(fake_folder: Path) -> None:
    template = ChatTemplate.load(fake_folder)
    assert template is not None
    asked = "<|im_start|>user\nHello<|im_end|>\n"
    assert template.render(HELLO) == asked + "<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == asked


def test_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(write(tmp_path, bos_token="<s>")) is None


def test_jinja_file_comes_first(tmp_path: Path) -> None:
    write(tmp_path, chat_template="config", bos_token={"content": "<s>"}, eos_token=None)
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "config"
    tmp_path.joinpath("chat_template.jinja").write_text("file {{ bos_token }}{{ eos_token }}é")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "file <s>é"


def test_special_tokens_of_older_models(tmp_path: Path) -> None:
    write(tmp_path, chat_template="{{ bos_token }}{{ eos_token }}", eos_token="</s>")
    special = {"bos_token": "<b>", "eos_token": "<other>"}
    tmp_path.joinpath("special_tokens_map.json").write_text(json.dumps(special))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "<b></s>"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = ChatTemplate.load(write(tmp_path, chat_template=named))
    assert template is not None
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[]) == "plain"
    assert template.render(HELLO, tools=[{"name": "f"}]) == "tools"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must be a string or a list"),
        ([{"name": "default"}], "must be a string or a list"),
        ([{"name": "rag", "template": ""}], r"none named 'default' \(only rag\)"),
        ([], "none named 'default'"),
        ("{% for %}", "'default' is broken"),
        ("{{ a b }}", "'default' is broken"),
        ("{{ x | unheard_of }}", "unheard_of"),
    ],
)
def test_broken_templates(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate.load(write(tmp_path, chat_template=value))


def test_what_templates_may_use() -> None:
    assert render("{{ bos_token }}{{ messages[0]['content'] }}{{ unk_token }}") == "<s>Hello"
    assert render("{{ tools is none and documents is none }}") == "True"
    assert render("{{ style }}", style="terse") == "terse"
    assert render("{{ x | tojson }}", x={"é": "<b>&'"}) == '{"é": "<b>&\'"}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"
    assert (
        render("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 2 * 3 ** 2 %}{{ ns.n }}") == "19"
    )
    assert render("{{ messages[0].content + '!' * 3 }}") == "Hello!!!"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[0].content + 1 }}", "failed.*str"),
        ("{{ messages[5].content }}", "failed"),
        ("{{ 1 // 0 }}", "failed.*zero"),
        ("{{ ''.__class__.__mro__ }}", "failed.*unsafe"),
        ("{{ messages.append(1) }}", "failed.*unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "failed.*[Rr]ange"),
        ("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}", "more than 4,194,304"),
        ("{{ 'x' * 10 ** 9 }}", "more than 4,194,304"),
        ("{{ 10 ** 9 * [1] }}", "more than 4,194,304"),
        ("{% set a = 'x' * 4000000 %}{{ a + a }}", "more than 4,194,304"),
        ("{{ 9 ** 9 ** 9 }}", "too large"),
    ],
)
def test_failures_and_limits(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


def test_a_long_chat_fits() -> None:
    text = "x" * (MAX_RENDERED_CHARS - 3)
    source = "{{ '<' + messages[0].content + '>\n' }}"
    assert render(source, [{"content": text}]) == f"<{text}>\n"
    with pytest.raises(ChatTemplateError):
        render(source, [{"content": text + "x"}])


@pytest.mark.model
def test_golden_chat(demo_folder: Path) -> None:
    chat = json.loads((Path(__file__).parents[1] / "golden" / "smollm2.json").read_text())["chat"]
    template = ChatTemplate.load(demo_folder)
    assert template is not None
    assert template.render(chat["messages"]) == chat["prompt"]
