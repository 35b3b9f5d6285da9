"""What Hugging Face's Trainer trains on several ranks, in the tests and in their processes."""

import transformers

import models
from trainers import CLIPPED

WIDE = {
    **models.SIZES,
    "vocab_size": 301,
    "hidden_size": 96,
    "intermediate_size": 168,
    "num_hidden_layers": 2,
}

OPTIONS = {
    **CLIPPED,
    "max_steps": 4,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
}


def rows_of(number, count):
    """Return rows of which some labels do not count, on each rank other ones."""
    shown = []
    for index, row in enumerate(models.batch(number, rows=count)):
        labels = row.clone()
        labels[: 3 * (index % 4)] = -100
        shown.append({"input_ids": row, "labels": labels})
    return shown


ROWS, HELD = rows_of(0, 24), rows_of(1, 6)


def build_llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE))
