"""Makes tests/golden/smollm2_chat.json: the log-probabilities of answers to conversations.

    python tests/golden/make_chat.py MODEL_DIR

Run by hand, as make_golden.py, in the same environment. The file holds:

    model_sha256, torch, transformers    what it was made with
    cases                                one object per conversation:
        messages                         as /v1/chat/completions takes them
        ids                              of the prompt that they render to
        output                           the greedy tokens after it
        top                              per token the 20 likeliest, as [text, log-softmax] pairs

All is computed in float32. A conversation is kept only if at every step the best token leads the
second by at least make_golden.MIN_GAP, so that rounding cannot change the tokens.
"""

import argparse
import hashlib
import json
import pathlib

import torch
import transformers
from make_golden import MIN_GAP, QUESTIONS, chat_case

NEW_TOKENS = 16
TOP = 20
WANTED = 3
TARGET = pathlib.Path(__file__).with_name("smollm2_chat.json")


@torch.inference_mode()
def answer(model, tokenizer, messages: list[dict]) -> dict | None:
    """The case of a conversation, or None if a decision was too close."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    output, top = [], []
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=torch.tensor([ids + output])).logits[0, -1]
        values, best = (each.tolist() for each in torch.log_softmax(logits, dim=-1).topk(TOP))
        if values[0] - values[1] < MIN_GAP:
            return None
        output.append(best[0])
        texts = [tokenizer.decode([token]) for token in best]
        top.append([[t, round(value, 5)] for t, value in zip(texts, values, strict=True)])
    return {"messages": messages, "ids": ids, "output": output, "top": top}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=pathlib.Path, metavar="MODEL_DIR")
    folder = parser.parse_args().model
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    conversations = [chat_case(tokenizer)["messages"]]
    conversations += [[{"role": "user", "content": question}] for question in QUESTIONS]
    found = (answer(model, tokenizer, messages) for messages in conversations)
    cases = [case for case in found if case][:WANTED]
    assert len(cases) == WANTED, f"only {len(cases)} conversations qualify"
    head = json.dumps(
        {
            "model_sha256": digest,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    TARGET.write_text(f'{head[:-1]},"cases":[\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes", *(len(case["ids"]) for case in cases))


if __name__ == "__main__":
    main()
