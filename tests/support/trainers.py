"""Hugging Face's Trainer as the reference recipe needs it, and what tests of it train."""

import torch
import transformers

import infinity
import models
from infinity.reference import clip_grad_norm_ as reference_clip
from infinity.reference import prepare

ROWS = [{"input_ids": row, "labels": row} for row in models.batch(0, rows=24)]


HELD = [{"input_ids": row, "labels": row} for row in models.batch(1, rows=4)]


ADAM = {"lr": 1e-2, "betas": (0.9, 0.95)}


QUIET = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
LOGGED = {**QUIET, "logging_steps": 1, "seed": 5}
CLIPPED = {
    **LOGGED,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
}
"""Options of a Trainer."""


class Recipe:
    """A Trainer that clips in fp32 as the recipe does, where torch rounds 16-bit gradients."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = lambda _, most: reference_clip(self.optimizer.optimizer, most)


class RecipeTrainer(Recipe, transformers.Trainer):
    pass


def build(name, folder=None, seed=0, dtype="bf16"):
    torch.manual_seed(seed)
    if folder is None:
        return prepare(models.MODELS[name]())
    with infinity.Init(nvme=str(folder), host_memory="1MiB", dtype=dtype):
        return models.MODELS[name]()


def logged(trainer, *names):
    return [tuple(map(entry.get, names)) for entry in trainer.state.log_history if names[0] in entry]
