"""Makes tests/golden/tiny/: random Llama checkpoints and what transformers answers for them.

    python tests/golden/make_tiny_llama.py

Run by hand, in an environment of its own, when the variants change:
    pip install torch==2.13.0 transformers==5.24.0

Each variant switches on traits that the demo model lacks. Its folder holds config.json and
model.safetensors (bfloat16, to be small; answers are computed in float32) and answers.json:

    prompt     token ids
    logits     the logits after the prompt
    output     32 greedy tokens after it

The weights are drawn by seed, and the first seed is taken for which the best token leads the
second by at least 0.02 at every step, so that rounding cannot change the tokens.
"""

import json
import pathlib

import torch
import transformers

TARGET = pathlib.Path(__file__).with_name("tiny")
NEW_TOKENS = 32
MIN_GAP = 0.02
PROMPT_LENGTHS = (1, 7, 40)
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIANTS = {
    "untied_biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "tied_llama3": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "head_dim": {"head_dim": 24, "num_key_value_heads": 4},
    "linear": {
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        "num_key_value_heads": 1,
    },
}


def random_model(config: transformers.LlamaConfig, seed: int) -> transformers.LlamaForCausalLM:
    """Weights that bfloat16 holds exactly, wide enough for varied answers; float32."""
    generator = torch.Generator().manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.5 * noise
        else:
            value = noise * 1.4 / weight.shape[-1] ** 0.5
        weight.data = value.to(torch.bfloat16).to(torch.float32)
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def answer(model: transformers.LlamaForCausalLM, prompt: list[int]) -> dict | None:
    """Logits and greedy tokens, or None when a decision is too close."""
    tokens, first = list(prompt), None
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        first = logits if first is None else first
        best, second = logits.topk(2).values.tolist()
        if best - second < MIN_GAP:
            return None
        tokens.append(int(logits.argmax()))
    rounded = [float(f"{value:.7g}") for value in first.tolist()]
    return {"prompt": prompt, "logits": rounded, "output": tokens[len(prompt) :]}


def make(name: str, changes: dict) -> None:
    config = transformers.LlamaConfig(**(BASE | changes))
    for seed in range(1000):
        model = random_model(config, seed)
        answers = []
        for length in PROMPT_LENGTHS:
            prompt = [(5 * i * i + 11 * i + length) % config.vocab_size for i in range(length)]
            answers.append(answer(model, prompt))
            if answers[-1] is None:
                break
        else:
            break
    else:
        raise SystemExit(f"{name}: no seed gives clear answers")
    folder = TARGET / name
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    lines = ",\n".join(json.dumps(each) for each in answers)
    (folder / "answers.json").write_text(f"[\n{lines}\n]\n")
    different = [len(set(each["output"])) for each in answers]
    print(f"{name}: seed {seed}, different tokens {different}")


if __name__ == "__main__":
    for each, its_changes in VARIANTS.items():
        make(each, its_changes)
