"""What a run trains, on what: a preset on bytes of text, or a model's folder on tokens of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from infinity.cli.data import Sequences, packed
from infinity.cli.language_model import LanguageModel
from infinity.cli.presets import PRESETS, llama
from infinity.cli.settings import TrainSettings
from infinity.cli.text import Sampler, Text, default_text
from infinity.sizes import format_size
from infinity.units.tracking import Stateful


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
    loader: Stateful
    """The position in the stream of batches, committed with durable steps."""
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    """Starts a stream without end of (token ids, labels), int64 [batch, sequence] each."""
    evaluation: Sequences | None = None
    tokenizer: Any = None

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files beside the weights, if there is one."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def task_of(settings: TrainSettings, rank: int, ranks: int) -> Task:
    """Read tokenizer and data; build nothing.

    Raises: ConfigError, DataError, TextError, OSError.
    """
    return _of_preset(settings, rank, ranks) if settings.model is None else _of_model(settings, rank, ranks)


def _of_preset(settings: TrainSettings, rank: int, ranks: int) -> Task:
    text = default_text() if settings.text is None else Text(settings.text)
    shape = {"batch": settings.batch, "sequence": settings.sequence, "seed": settings.seed}
    sampler = Sampler(text, **shape, rank=rank, ranks=ranks)
    return Task(
        name=settings.preset,
        about=f"text: {text.path}, {text.files:,} files, {format_size(text.nbytes)}",
        unit="byte",
        build=lambda: llama(PRESETS[settings.preset], settings.sequence),
        loader=sampler,
        batches=lambda: ((ids, ids) for ids in sampler),
    )


def _of_model(settings: TrainSettings, rank: int, ranks: int) -> Task:
    model = LanguageModel(settings, frozen=settings.lora > 0)

    def sequences(paths: Any, flag: str) -> tuple[Sequences, str]:
        rows, about = packed(paths, model.tokenizer, settings.sequence, flag)
        shape = {"batch": settings.batch, "seed": settings.seed}
        return Sequences(rows, **shape, rank=rank, ranks=ranks), about

    stream, about = sequences(settings.data, "--data")
    evaluation = None
    if settings.eval_data:
        evaluation, evaluated = sequences(settings.eval_data, "--eval-data")
        about += f"\nevaluation: {evaluated}"
    drawn = settings.steps * settings.accumulate * settings.batch * ranks
    weights = "fresh weights" if model.fresh else f"weights of {model.folder}"
    return Task(
        name=model.name,
        about=f"{weights}; data: {about}; {drawn / len(stream):.2g} epochs",
        unit="token",
        build=model.build,
        loader=stream,
        batches=lambda: iter(stream),
        evaluation=evaluation,
        tokenizer=model.tokenizer,
    )
