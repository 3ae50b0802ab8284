"""A Transformers model with random weights: trained by its Trainer and watched (marked with sw), or as a task.

python examples/transformers_symbols.py
scalewise train examples/transformers_symbols.py --workers 8 --processes 2
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import scalewise as sw
from scalewise.adapters.transformers import Scalewise  # sw

LONGEST, SYMBOLS = 12, 16
CONFIG = GPT2Config(
    vocab_size=SYMBOLS, n_positions=LONGEST, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)


def rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Sequences of different lengths, padded; padding has the label −100."""
    generator = torch.Generator().manual_seed(seed)
    start, stride = (torch.randint(1, SYMBOLS, (count, 1), generator=generator) for _ in range(2))
    symbols = (start + stride * torch.arange(LONGEST)) % SYMBOLS
    there = torch.arange(LONGEST) < torch.randint(4, LONGEST + 1, (count, 1), generator=generator)
    names = {"input_ids": symbols, "attention_mask": there.long(), "labels": torch.where(there, symbols, -100)}
    return [{name: values[row].tolist() for name, values in names.items()} for row in range(count)]


def task() -> sw.Task:
    recipe = sw.Recipe(worker_batch=16, epochs=3.0, optimizer="adamw", lr=0.003)
    return sw.adapters.transformers.task(lambda: GPT2LMHeadModel(CONFIG), rows(800, 0), rows(200, 1), recipe=recipe)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = Trainer(
        GPT2LMHeadModel(CONFIG),
        TrainingArguments(
            "trainer", learning_rate=0.003, per_device_train_batch_size=16, num_train_epochs=3, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=True,
        ),
        train_dataset=rows(800, 0),
        callbacks=[Scalewise()],  # sw
    )  # fmt: skip
    trainer.train()
    print("weights", sum(parameter.double().sum().item() for parameter in trainer.model.parameters()))
