"""What a run trains, on what: a preset on bytes of text, or a model's folder on tokens of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.cli.data import packed
from infinity.cli.language_model import LanguageModel
from infinity.cli.presets import PRESETS, llama
from infinity.cli.settings import TrainSettings
from infinity.cli.text import Text, Windows, default_text
from infinity.sizes import format_size


@dataclass(frozen=True, slots=True)
class Task:
    """A model that is to be built, and its batches."""

    name: str
    about: str
    """A line about the data."""
    unit: str
    """Of sequences and losses: "byte" or "token"."""
    build: Callable[[], Any]
    """Builds the model, within Init where it is offloaded."""
    data: Any
    """Rows of input_ids and labels."""
    shuffled: bool
    """Whether the rows' order is drawn anew for each epoch; else they are drawn themselves."""
    evaluation: Any = None
    """Rows as those of `data`, with the number of tokens to learn of each: learned."""
    tokenizer: Any = None

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files beside the weights, if there is one."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def task_of(settings: TrainSettings, ranks: int) -> Task:
    """Read tokenizer and data, for so many ranks; build nothing.

    Raises: ConfigError, DataError, TextError, OSError.
    """
    drawn = settings.steps * settings.accumulate * settings.batch * ranks
    return _of_preset(settings, drawn) if settings.model is None else _of_model(settings, drawn)


def _of_preset(settings: TrainSettings, drawn: int) -> Task:
    text = default_text() if settings.text is None else Text(settings.text)
    return Task(
        name=settings.preset,
        about=f"text: {text.path}, {text.files:,} files, {format_size(text.nbytes)}",
        unit="byte",
        build=lambda: llama(PRESETS[settings.preset], settings.sequence),
        data=Windows(text, sequence=settings.sequence, count=drawn, seed=settings.seed),
        shuffled=False,
    )


def _of_model(settings: TrainSettings, drawn: int) -> Task:
    model = LanguageModel(settings, frozen=settings.lora > 0)
    data, about = packed(settings.data or (), model.tokenizer, settings.sequence, "--data")
    evaluation = None
    if settings.eval_data:
        evaluation, evaluated = packed(settings.eval_data, model.tokenizer, settings.sequence, "--eval-data")
        about += f"\nevaluation: {evaluated}"
    weights = "fresh weights" if model.fresh else f"weights of {model.folder}"
    return Task(
        name=model.name,
        about=f"{weights}; data: {about}; {drawn / len(data):.2g} epochs",
        unit="token",
        build=model.build,
        data=data,
        shuffled=True,
        evaluation=evaluation,
        tokenizer=model.tokenizer,
    )
