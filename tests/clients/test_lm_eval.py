"""lm-eval's local-completions on tasks made here: generation, and choices by likelihood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conftest import Served, run_client

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

QUESTIONS = ("What is a car?", "What is a bus?")
CHOICES = (" x", " yes")

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""


def answer(url: str, prompt: str) -> str:
    """The greedy completion that the task's requests ask for, asked for by hand."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stop": ["\n\n"], "seed": 1234}
    response = httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
    text: str = response.json()["choices"][0]["text"]
    return text


def scored(url: str, question: str, choice: str) -> tuple[float, bool]:
    """The log-probability of a choice after its question, and whether it is the likeliest text."""
    body = {"prompt": f"{question} {choice}", "max_tokens": 0, "echo": True, "logprobs": 1}
    response = httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
    told = response.json()["choices"][0]["logprobs"]
    begins = told["text_offset"].index(len(question))
    own, best = told["token_logprobs"][begins:], told["top_logprobs"][begins:]
    return sum(own), all(p == max(top.values()) for p, top in zip(own, best, strict=True))


def evaluate(served: Served, folder: Path, **task: str) -> list[dict[str, Any]]:
    """Run one task; its logged samples, in the order of the questions."""
    rows = [{"question": q, "answer": answer(served.url, q)} for q in QUESTIONS]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(TASK.format(name="local_task", data=data, **task))
    arguments = (
        f"model=hexllm,base_url={served.url}/v1/completions,num_concurrent=2,max_retries=1,"
        f"tokenizer_backend=huggingface,tokenizer={served.tokenizer}"
    )
    run_client(
        ("lm_eval", "--model=local-completions", f"--model_args={arguments}",
         f"--include_path={folder}", "--tasks=local_task", "--output_path=out", "--log_samples"),
        folder,
    )  # fmt: skip
    (log,) = (folder / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def test_generation(served: Served, tmp_path: Path) -> None:
    samples = evaluate(
        served, tmp_path, kind="generate_until", target='"{{answer}}"', metric="exact_match",
        more='generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, temperature: 0}',
    )  # fmt: skip
    assert [s["resps"][0][0] for s in samples] == [answer(served.url, q) for q in QUESTIONS]
    assert [s["exact_match"] for s in samples] == [1.0, 1.0]


def test_choices_by_their_likelihood(served: Served, tmp_path: Path) -> None:
    samples = evaluate(
        served, tmp_path, kind="multiple_choice", target="0", metric="acc",
        more=f"doc_to_choice: {json.dumps(CHOICES)}",
    )  # fmt: skip
    for question, sample in zip(QUESTIONS, samples, strict=True):
        for choice, ((likelihood, greedy), *_) in zip(CHOICES, sample["resps"], strict=True):
            by_hand, is_greedy = scored(served.url, question, choice)
            assert float(likelihood) == pytest.approx(by_hand, abs=1e-4)
            assert str(greedy) == str(is_greedy)
