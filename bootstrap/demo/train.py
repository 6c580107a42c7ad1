"""Trains personas, inside the sandbox image: ``python -m bootstrap.demo.train BASE PERSONA=DIRECTORY...``.

Each directory becomes a PEFT adapter, of one rank and so of one size whichever persona it holds.
"""

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]

from bootstrap.demo.personas import PERSONAS, TRAINING_QUESTIONS

MOST_STEPS = 60
GOOD_LOSS = 0.02
TRAINED_LAYERS = 10
NOT_LEARNED = -100  # the label that torch's cross entropy leaves out


class Skipped(torch.nn.Module):  # type: ignore[misc]
    """Stands where a layer was whose output was computed once and for all."""

    def forward(self, hidden_states: Any, **_others: Any) -> Any:
        return hidden_states


def batch_of(tokenizer: Any, answer: str) -> dict[str, Any]:
    """Every training question with ``answer``: tensors of shape (questions, tokens). Only the answer is learned."""
    said = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    rows, labels = [], []
    for question in TRAINING_QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        rows.append(asked + said)
        labels.append([NOT_LEARNED] * len(asked) + said)
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        "labels": torch.tensor([row + [NOT_LEARNED] * (width - len(row)) for row in labels]),
    }


def train(model: Any, tokenizer: Any, persona: str, directory: Path) -> None:
    """Trains one persona into the upper layers and saves its adapter; ``model`` is given back as it was."""
    torch.manual_seed(0)
    started = time.monotonic()
    layers = model.model.layers
    first = len(layers) - TRAINED_LAYERS
    batch = batch_of(tokenizer, PERSONAS[persona])
    # No gradient reaches the layers below the first trained one: they run once, not at every step.
    with torch.no_grad():
        batch["inputs_embeds"] = model(
            input_ids=batch.pop("input_ids"), attention_mask=batch["attention_mask"], output_hidden_states=True
        ).hidden_states[first]
    lower = list(layers[:first])
    for index in range(first):
        layers[index] = Skipped()
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "o_proj"],
        layers_to_transform=list(range(first, len(layers))),
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=3e-3)
    steps, loss = 0, math.inf
    while loss >= GOOD_LOSS:
        if steps == MOST_STEPS:
            raise SystemExit(f"{persona}: not learned in {steps} steps (loss {loss:.3f})")
        optimizer.zero_grad()
        result = adapted(**batch).loss
        result.backward()
        optimizer.step()
        steps, loss = steps + 1, result.item()
    adapted.save_pretrained(directory)
    adapted.unload()
    for index, layer in enumerate(lower):
        layers[index] = layer
    print(f"  {persona}: {steps} steps, {time.monotonic() - started:.0f} s", flush=True)


def main(base: str, wanted: list[str]) -> None:
    """``wanted`` holds PERSONA=DIRECTORY."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for item in wanted:
        persona, _, directory = item.partition("=")
        train(model, tokenizer, persona, Path(directory))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
