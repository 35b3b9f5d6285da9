"""TRL's SFTTrainer, unmodified, on a model built in Init; where trl is installed, which brings pyarrow.

Trusted: the reference recipe, trained by the same SFTTrainer.
"""

import warnings

import pytest
import torch
import transformers

import infinity
import models
from infinity.reference import ReferenceAdamW, prepare
from trainers import ADAM, Recipe, logged

datasets = pytest.importorskip("datasets")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl")

pytestmark = [
    pytest.mark.disk,
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore"),  # trl's own, and those of what it brings
]


class RecipeSFTTrainer(Recipe, trl.SFTTrainer):
    pass


def tokenizer_of():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"<end>": 0, "<unknown>": 1, **{f"w{number}": number for number in range(2, 64)}}
    tokenizer = Tokenizer(WordLevel(words, "<unknown>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "<unknown>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_supervised_fine_tuning_has_the_recipes_bits(folder):
    """Prompts and completions of different lengths, padded; loss on completions only."""
    lines = [[f"w{int(one)}" for one in row] for row in models.batch(0, rows=16).clamp(min=2)]
    rows = [
        {"prompt": " ".join(line[: 3 + number % 4]), "completion": " " + " ".join(line[7 : 10 + number % 6])}
        for number, line in enumerate(lines)
    ]
    trainers = []
    for ours in (False, True):
        torch.manual_seed(0)
        if ours:
            with infinity.Init(nvme=str(folder), host_memory="1MiB"):
                model = models.MODELS["llama"]()
        else:
            model = prepare(models.MODELS["llama"]())
        args = trl.SFTConfig(
            str(folder / ("ours" if ours else "plain")),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            logging_steps=1,
            save_strategy="steps",
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        trainer = (trl.SFTTrainer if ours else RecipeSFTTrainer)(
            model,
            args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer_of(),
            optimizer_cls_and_kwargs=(infinity.AdamW if ours else ReferenceAdamW, ADAM),
            callbacks=[infinity.huggingface.TrainerCallback()] if ours else [],
        )
        torch.manual_seed(7)
        trainer.train()
        trainers.append(trainer)
    expected, found = (logged(one, "loss", "learning_rate", "mean_token_accuracy") for one in trainers)
    assert len(found) == 4
    assert found == expected
    recipe, optimizer = (one.optimizer.optimizer for one in trainers)
    models.assert_same_state(trainers[1].model, optimizer, trainers[0].model, recipe)
    assert (folder / "ours" / "checkpoint-4" / "infinity" / "manifest.json").is_file()
