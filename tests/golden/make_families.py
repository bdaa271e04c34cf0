"""Makes tests/golden/families/: what transformers answers for tiny models of every family.

    PYTHONPATH=. python tests/golden/make_families.py [NAME ...]

Run by hand, in an environment of its own, when tests/golden/family_models.py changes:
    pip install torch==2.13.0 transformers==5.24.0

Each file holds the seed of the weights, and for each prompt:

    prompt     token ids
    logits     the logits after the prompt
    output     64 greedy tokens after it

The first seed is taken whose answers vary, and in which the best token leads the second by at
least MIN_GAP at every step, so that rounding cannot change the tokens. LongRoPE
models are held to one set of factors, chosen by the longest sequence, as the engine does.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

import torch
import transformers
from safetensors.numpy import save_file

from tests.golden.family_models import (
    MAX_MODEL_LEN,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    VARIANTS,
    prompt_of,
    stored_tensors,
)

TARGET = pathlib.Path(__file__).with_name("families")
MIN_GAP = 0.003
MIN_DIFFERENT = 8


def load(config: dict[str, Any], seed: int) -> Any:
    """transformers' model of the checkpoint; every tensor of it must have found its place."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(stored_tensors(config, seed), folder / "model.safetensors", {"format": "pt"})
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    wrong = {kind: names for kind, names in report.items() if names}
    if wrong:
        raise SystemExit(f"the checkpoint does not fit: {wrong}")
    fix_longrope(model)
    return model.eval()


def fix_longrope(model: Any) -> None:
    """Use the factors that the longest sequence needs for all of them."""
    rope = model.config.rope_parameters
    if rope.get("rope_type") != "longrope":
        return
    make = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
    frequencies, _ = make(model.config, None, seq_len=MAX_MODEL_LEN)
    rotary = model.model.rotary_emb
    rotary.original_inv_freq = rotary.long_inv_freq = frequencies


@torch.no_grad()
def answer(model: Any, prompt: list[int]) -> dict[str, Any] | None:
    """Logits and greedy tokens, or None when a decision is too close, or all are alike."""
    tokens, first = list(prompt), None
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        first = logits if first is None else first
        best, second = logits.topk(2).values.tolist()
        if best - second < MIN_GAP:
            return None
        tokens.append(int(logits.argmax()))
    if len(set(tokens[len(prompt) :])) < MIN_DIFFERENT:
        return None
    rounded = [float(f"{value:.7g}") for value in first.tolist()]
    return {"prompt": prompt, "logits": rounded, "output": tokens[len(prompt) :]}


def make(name: str) -> None:
    for seed in range(1000):
        model = load(VARIANTS[name], seed)
        answers = []
        for length in PROMPT_LENGTHS:
            answers.append(answer(model, prompt_of(length)))
            if answers[-1] is None:
                break
        else:
            break
    else:
        raise SystemExit(f"{name}: no seed gives clear answers")
    lines = ",\n".join(json.dumps(each) for each in answers)
    TARGET.mkdir(exist_ok=True)
    (TARGET / f"{name}.json").write_text(f'{{"seed": {seed}, "answers": [\n{lines}\n]}}\n')
    print(name, "seed", seed, "different tokens", [len(set(a["output"])) for a in answers])


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for each in sys.argv[1:] or VARIANTS:
        make(each)
