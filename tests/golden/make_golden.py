"""Makes tests/golden/smollm2.json: what transformers answers, for the engine to be held to.

    python tests/golden/make_golden.py MODEL_DIR

Run by hand, in an environment of its own, when the demo model or the prompts change:
    pip install torch==2.13.0 transformers==5.24.0
MODEL_DIR is the demo model's folder, as `hexserve demo` leaves it in the cache.

Each case is a prompt and 64 greedy tokens after it, computed in float32 with a KV cache and
going on past the end-of-sequence token. Two correct programs differ in the last bits of
their logits, so a prompt is kept only if at every step the best token leads the second by at
least 0.003 in log-probability. The file holds:

    model_sha256, torch, transformers    what it was made with
    min_gap, new_tokens                  the two numbers above
    cases                                one object per prompt:
        kind, prompt                     the text's kind, the prompt's ids
        output                           the 64 ids
        logprobs                         the log-probability of each
        top                              per step the 5 best, as [id, log-probability] pairs
        smallest_gap                     the closest decision of the 64
    chat                                 messages, the prompt they render to, and its ids
"""

import argparse
import hashlib
import json
import pathlib
import random
from collections.abc import Iterator

import torch
import transformers

NEW_TOKENS = 64
MIN_GAP = 0.003
TOP = 5
WANTED = 21
ATTEMPTS = 8  # texts tried for one length
LENGTHS = (1, 2, 3, 5, 8, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129)
LENGTHS += (255, 256, 257, 400, 511, 512, 513, 800, 1024, 1200, 1500, 1984)
MUST_HAVE = (1, 1500, 1984)
CHATS = 3
TARGET = pathlib.Path(__file__).with_name("smollm2.json")

SUBJECTS = (
    "The old lighthouse keeper", "A young engineer from Porto", "The committee", "Our neighbour",
    "The river", "A small bakery on the corner", "The last train to Vienna", "The librarian",
    "An astronomer in Chile", "The history of glass", "The orchestra", "My grandmother",
)  # fmt: skip
ACTIONS = (
    "never expected to find", "spent three winters studying", "wrote a long letter about",
    "was asked to repair", "slowly came to understand", "refused to sell", "carefully measured",
    "told the children a story about", "argued for hours over", "painted a picture of",
)  # fmt: skip
OBJECTS = (
    "a map of the northern coast", "the broken clock in the town hall", "two jars of honey",
    "the migration of cranes", "a bridge that had stood for 212 years", "the price of salt",
    "an unfinished symphony", "the smell of rain on warm stone", "a box of blue letters",
    "the orbits of 17 small moons",
)  # fmt: skip
ENDINGS = (
    "before the first snow fell.", "and nobody could say why.", "which surprised everyone.",
    "while the rest of the village slept.", "in the summer of 1954.", "as the doctor had advised.",
    "until the money ran out.", "although it was only Tuesday.",
)  # fmt: skip
ELSEWHERE = (
    "Der Zug fährt um 8:45 Uhr von Gleis 3 ab, sagte die Schaffnerin.",
    "La bibliothèque est fermée le lundi, mais le café reste ouvert.",
    "El río cruza la ciudad de norte a sur.",
    "今日はとても天気がいいので、散歩に行きましょう。",
    "Она открыла окно и увидела море.",
    "Great job 👍🏽, see you at the café tomorrow 🎉!",
)
QUESTIONS = (
    "What is the capital of France?",
    "Explain in simple words why the sky is blue.",
    "Write a short poem about a cat that is afraid of mice.",
    "List five fruits that are red.",
    "How do I boil an egg?",
    "What is 12 times 12?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me three tips for sleeping better.",
)


def prose(rng: random.Random) -> str:
    return " ".join(rng.choice(part) for part in (SUBJECTS, ACTIONS, OBJECTS, ENDINGS))


def code(rng: random.Random) -> str:
    name = rng.choice(("total", "area", "average", "longest", "count_words"))
    return (
        f"\n\ndef {name}(values):\n    result = {rng.randrange(10)}\n"
        f"    for value in values:\n        result += value * {rng.randrange(2, 99)}\n"
        f"    return result\n\n"
    )


def table(rng: random.Random) -> str:
    rows = (f"| {rng.choice(OBJECTS)} | {rng.randrange(1000)} |" for _ in range(3))
    return "\n\n| item | number |\n|---|---|\n" + "\n".join(rows) + "\n\n"


def text(kind: str, rng: random.Random, tokens: int) -> str:
    """Makes a text of one kind that is longer than `tokens` tokens."""
    parts: list[str] = []
    while sum(map(len, parts)) < 8 * tokens + 64:
        parts.append(prose(rng) + (" " if rng.random() < 0.8 else "\n\n"))
        if kind == "code" or (kind == "mixed" and rng.random() < 0.15):
            parts.append(code(rng))
        if kind == "mixed" and rng.random() < 0.15:
            parts.append(table(rng))
        if kind == "languages" or (kind == "mixed" and rng.random() < 0.2):
            parts.append(rng.choice(ELSEWHERE) + " ")
    return "".join(parts)


def candidates(tokenizer, length: int) -> Iterator[tuple[str, list[int]]]:
    """Yields (kind, ids) prompts of exactly `length` tokens."""
    for attempt in range(ATTEMPTS):
        rng = random.Random(f"{length}/{attempt}")
        kind = ("prose", "mixed", "code", "languages")[(length + attempt) % 4]
        ids = tokenizer(text(kind, rng, length)).input_ids
        # A text begins somewhere: short prompts should not all be a first subject's words.
        start = rng.randrange(len(ids) - length) if length < 8 else 0
        yield kind, ids[start : start + length]


def chat_prompts(tokenizer) -> Iterator[tuple[str, list[int]]]:
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        yield "chat", ids


@torch.inference_mode()
def answer(model, kind: str, prompt: list[int]) -> dict | None:
    """Returns the case of a prompt, or None if a decision was too close."""
    feed, cache = torch.tensor([prompt]), None
    output, logprobs, top, gaps = [], [], [], []
    for _ in range(NEW_TOKENS):
        result = model(input_ids=feed, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        scores = torch.log_softmax(result.logits[0, -1].double(), dim=-1)
        values, ids = (best.tolist() for best in scores.topk(TOP))
        gaps.append(values[0] - values[1])
        if gaps[-1] < MIN_GAP:
            return None
        output.append(ids[0])
        logprobs.append(round(values[0], 5))
        top.append([[token, round(value, 5)] for token, value in zip(ids, values, strict=True)])
        feed = torch.tensor([[ids[0]]])
    return {
        "kind": kind,
        "prompt": prompt,
        "output": output,
        "logprobs": logprobs,
        "top": top,
        "smallest_gap": round(min(gaps), 5),
    }


def first_case(model, prompts: Iterator[tuple[str, list[int]]]) -> dict | None:
    for kind, prompt in prompts:
        case = answer(model, kind, prompt)
        verdict = f"kept, smallest gap {case['smallest_gap']}" if case else "too close"
        print(f"{kind:9} {len(prompt):5} tokens: {verdict}", flush=True)
        if case:
            return case
    return None


def spread(cases: list[dict], wanted: int) -> list[dict]:
    """Drops cases evenly, never those of MUST_HAVE, until `wanted` are left."""
    rng = random.Random(0)
    cases = list(cases)
    while len(cases) > wanted:
        free = [case for case in cases if len(case["prompt"]) not in MUST_HAVE]
        cases.remove(rng.choice(free))
    return cases


def chat_case(tokenizer) -> dict:
    messages = [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "Where is the café? 👍🏽\n"},
        {"role": "assistant", "content": "By the river, 3 streets from here."},
        {"role": "user", "content": "今日は open?"},
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return {"messages": messages, "prompt": prompt, "ids": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=pathlib.Path, metavar="MODEL_DIR")
    folder = parser.parse_args().model
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    chats = chat_prompts(tokenizer)
    by_chat = [case for _ in range(CHATS) if (case := first_case(model, chats))]
    by_length = [
        case for length in LENGTHS if (case := first_case(model, candidates(tokenizer, length)))
    ]
    cases = spread(by_length, WANTED - len(by_chat)) + by_chat
    assert len(cases) == WANTED, f"only {len(cases)} prompts qualify"
    golden = {
        "model_sha256": digest,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "min_gap": MIN_GAP,
        "new_tokens": NEW_TOKENS,
        "cases": sorted(cases, key=lambda case: len(case["prompt"])),
        "chat": chat_case(tokenizer),
    }
    # One line a case: small, and a change shows which cases it touches.
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in golden.pop("cases"))
    head = json.dumps(golden, separators=(",", ":"))
    TARGET.write_text(f'{head[:-1]},"cases":[\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes, lengths", end=" ")
    print(*(len(case["prompt"]) for case in sorted(cases, key=lambda case: len(case["prompt"]))))


if __name__ == "__main__":
    main()
