"""`infinity generate`: answers to a file of prompts, many sequences for each pass over the weights."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from tqdm import tqdm

from infinity.cli.language_model import ADAPTER, LanguageModel, adapted
from infinity.cli.prompts import Prompt, read_prompts
from infinity.cli.settings import TrainSettings
from infinity.config.settings import Config
from infinity.engine.engine import engine_of_model
from infinity.engine.init import Init
from infinity.engine.stats import Stats, stats
from infinity.errors import ConfigError, InfinityError
from infinity.planning.budget import least_total
from infinity.sizes import format_size, parse_size

HELP = "Answer a file of prompts, within a budget of host memory; weights that do not fit stream from NVMe."

_TILE_SHARE = 8
"""One part in so many of the budget: what a layer's activations, keys and values may take, by estimate."""
_WAITS_MOSTLY = 0.5
"""Of the seconds: where reads take more, they are what bounds a generation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--model",
        metavar="FOLDER",
        required=True,
        help="a causal language model of transformers, with weights",
    )
    adapter = "PEFT's adapters of that model, as `infinity train --lora` saves them"
    add("--adapter", metavar="FOLDER", help=adapter)
    add("--tokenizer", metavar="FOLDER", help="the tokenizer's folder (default: the model's)")
    prompts = (
        "a text file, a prompt a line; or JSON lines (*.jsonl) of prompt, or messages for the chat template"
    )
    add("--prompts", metavar="FILE", required=True, help=prompts)
    add("--out", metavar="FILE", help="a new file for the answers, JSON lines (default: standard output)")
    add("--batch", metavar="N", type=int, default=16, help="sequences for each pass over the weights (16)")
    add(
        "--tile",
        metavar="N",
        type=int,
        help="sequences of a batch that a layer computes at a time, to save memory (default: as many as an "
        "eighth of the budget holds)",
    )
    add("--max-new-tokens", metavar="N", type=int, default=128, help="of an answer (128)")
    add("--temperature", metavar="X", type=float, help="sample at this temperature (default: greedily)")
    add(
        "--top-p",
        metavar="X",
        type=float,
        help="sample among the likeliest tokens that together have this share",
    )
    add("--seed", metavar="N", type=int, default=0, help="of sampling (0)")
    add(
        "--prefill",
        metavar="TOKENS",
        type=int,
        help="take prompts in chunks of so many tokens, to save memory (default: whole, where an eighth of "
        "the budget holds one)",
    )
    nvme = (
        "a folder for what cannot be read from the model's files: with --kv-memory, keys and values; may be "
        "repeated"
    )
    add("--nvme", metavar="DIR", action="append", help=nvme)
    add("--host-memory", metavar="SIZE", help='hard budget, like "8GiB" (default: half of what is available)')
    kept = (
        "keep keys and values in this share of the budget, and beyond it on NVMe (default: beside the budget)"
    )
    add("--kv-memory", metavar="SIZE", help=kept)
    add("--device", help='where the model computes, "cpu" or "cuda"')


def run(options: argparse.Namespace, _: Console) -> int:
    """Generate; figures go to standard error."""
    _check(options)
    settings = TrainSettings(
        model=options.model, tokenizer=options.tokenizer, checkpointing=False, sequence=1
    )
    source = LanguageModel(settings, frozen=True)
    if source.fresh:
        raise ConfigError(f"--model {options.model}: no weights there. Name a folder with safetensors files.")
    tokenizer = source.tokenizer
    prompts = read_prompts(options.prompts, tokenizer, options.max_new_tokens, source.positions)
    with contextlib.ExitStack() as ends:
        config = Config(nvme=options.nvme, host_memory=options.host_memory, device=options.device)
        with Init(config, frozen=True):  # so that weights are read from where they lie
            model = source.build()
        ends.callback(_closed, model)
        if options.adapter is not None:
            model = adapted(model, options.adapter)
        out = ends.enter_context(_answers(options.out))  # not before: a model refused leaves no file
        model.eval()
        figures = _generate(model, tokenizer, prompts, options, out)
    Console(stderr=True).print(figures.text(), markup=False, highlight=False, soft_wrap=True)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot work, before anything is read.

    Raises: ConfigError naming the option.
    """
    top_p, temperature = options.top_p, options.temperature
    wrong = {
        "runs in one process, not under torchrun: give --batch instead.": int(
            os.environ.get("WORLD_SIZE", "1")
        )
        > 1,
        "--batch, --tile, --max-new-tokens and --prefill are at least 1.": any(
            one is not None and one < 1
            for one in (options.batch, options.tile, options.max_new_tokens, options.prefill)
        ),
        "--temperature is above 0; leave it out to take the likeliest token.": temperature is not None
        and not temperature > 0,
        "--top-p is above 0 and at most 1.": top_p is not None and not 0 < top_p <= 1,
        f"--adapter {options.adapter}: holds no {ADAPTER}. Name a folder that `infinity train --lora` or "
        "PEFT has saved.": options.adapter is not None and not (Path(options.adapter) / ADAPTER).is_file(),
        f"--out {options.out} exists, and is never overwritten: name a new file.": options.out is not None
        and Path(options.out).exists(),
        f"--out {options.out}: there is no folder of that file.": options.out is not None
        and not Path(options.out).parent.is_dir(),
    }
    for why, so in wrong.items():
        if so:
            raise ConfigError(f"infinity generate: {why}" if not why.startswith("--") else why)
    for name in ("host_memory", "kv_memory"):
        if getattr(options, name) is not None:
            parse_size(getattr(options, name), "--" + name.replace("_", "-"))


def _closed(model: Any) -> None:
    with contextlib.suppress(InfinityError, OSError):  # what went wrong was raised before
        engine_of_model(model).close()


@contextlib.contextmanager
def _answers(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with Path(path).open("x", encoding="utf-8") as file:
        yield file


@dataclass(slots=True)
class Figures:
    """What a generation took."""

    sequences: int = 0
    tokens: int = 0
    """Of answers."""
    prompt_tokens: int = 0
    first_s: float = 0.0
    """To the first token of the first batch."""
    seconds: float = 0.0
    done: Stats | None = None
    fits_nbytes: int = 0
    """The host_memory with which no token reads weights."""
    tile: int = 0
    """Sequences that a layer has computed at a time, at most; 0: whole batches."""
    why_whole: list[str] = field(default_factory=list)
    """Why batches ran whole all the same; empty where they did not."""
    chunk: int | None = None
    """Tokens of a prompt that came at a time, where the budget asked for that."""

    def text(self) -> str:
        """Say it in four lines."""
        lines = []
        lines.append(
            f"{self.sequences:,} prompts of {self.prompt_tokens:,} tokens; {self.tokens:,} tokens in "
            f"{self.seconds:.1f} s: {self.tokens / max(self.seconds, 1e-9):.2f} tokens/s, the first after "
            f"{self.first_s:.2f} s"
            + (f"; a layer computed {self.tile} at a time" if self.tile and not self.why_whole else "")
            + (f"; prompts came in chunks of {self.chunk} tokens" if self.chunk else "")
        )
        if self.done is None:
            return lines[0]
        read = self.done.nvme_read_nbytes + self.done.checkpoint_read_nbytes
        rounds = max(1, self.done.rounds)
        lines.append(
            f"disk: read {format_size(read)}, {format_size(read / max(1, self.tokens))} a token, "
            f"{format_size(read / rounds)} a pass over the weights ({self.done.rounds:,} passes); computing "
            f"waited {self.done.stall_s:.1f} s"
        )
        lines.append(f"bound: {self.bound()}")
        return "\n".join(lines)

    def bound(self) -> str:
        """Say what more of which would make it faster."""
        if self.done is None or self.done.stall_s < _WAITS_MOSTLY * self.seconds:
            return "computing"
        return (
            "the disk. A larger --batch shares each pass; from --host-memory "
            f"{format_size(self.fits_nbytes)} on weights are read once."
        )


def _generate(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], options: argparse.Namespace, out: TextIO
) -> Figures:
    """Answer all prompts, batch by batch, in their order."""
    engine = engine_of_model(model)
    weights = sum(unit.record.field_nbytes("hi") for unit in engine.units)
    largest = max(unit.resident_nbytes for unit in engine.units)
    figures = Figures(fits_nbytes=least_total(weights, largest, engine.schema))
    _tile(model, prompts, options, figures)
    torch.manual_seed(options.seed)
    before, began = stats(model), time.perf_counter()
    with _Progress(len(prompts), options.max_new_tokens, figures, began) as progress:
        for start in range(0, len(prompts), options.batch):
            batch = prompts[start : start + options.batch]
            answers, tokens = _answer(model, tokenizer, batch, options, progress)
            for prompt, answer in zip(batch, answers, strict=True):
                said = {**prompt.said, "completion": answer}
                out.write(json.dumps(said, ensure_ascii=False) + "\n")
            out.flush()
            figures.sequences += len(batch)
            figures.tokens += tokens
            figures.prompt_tokens += sum(len(one.ids) for one in batch)
            figures.seconds = time.perf_counter() - began
            progress.batch_over()
    figures.done = stats(model).since(before)
    return figures


def _tile(model: Any, prompts: Sequence[Prompt], options: argparse.Namespace, figures: Figures) -> None:
    """Have layers compute as many sequences at a time as asked, or as _TILE_SHARE of the budget holds; set
    options.prefill where it does not hold one.
    """
    from infinity.huggingface.batch_tiles import tile_generation_, tile_where_possible_, widths_of

    batch = min(options.batch, len(prompts))
    if options.tile is not None and options.tile < batch:
        tile_generation_(model, sequences=options.tile)
        figures.tile = options.tile
    try:
        widths = widths_of(model)
    except (AttributeError, ValueError):  # of an architecture whose blocks are not known
        return
    engine = engine_of_model(model)
    limit = engine.budget.total_nbytes // _TILE_SHARE
    engine.outgoing_share.use_in_rounds()  # what that holds has its place in the budget
    prompt = max(len(one.ids) for one in prompts)
    if options.prefill is None:
        figures.chunk = options.prefill = widths.chunk(prompt, limit)
    if options.tile is None:
        at_once, tokens = min(prompt, options.prefill or prompt), prompt + options.max_new_tokens
        tile = widths.sequences(batch, at_once, tokens, limit)
        if tile < batch:
            figures.tile, figures.why_whole = tile, tile_where_possible_(model, tile)


def _answer(
    model: Any, tokenizer: Any, batch: Sequence[Prompt], options: argparse.Namespace, progress: _Progress
) -> tuple[list[str], int]:
    """Return the answers of a batch, and their tokens: of each, to its end, without what fills the batch."""
    from infinity.huggingface.kv_cache import KVCache

    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    width = max(len(prompt.ids) for prompt in batch)
    ids = torch.tensor([[pad] * (width - len(one.ids)) + one.ids for one in batch], device="cpu")
    mask = torch.tensor([[0] * (width - len(one.ids)) + [1] * len(one.ids) for one in batch], device="cpu")
    samples = options.temperature is not None or options.top_p is not None
    more: dict[str, Any] = {"do_sample": samples}
    if samples:
        more |= {"temperature": options.temperature or 1.0, "top_p": options.top_p or 1.0, "top_k": 0}
    if options.prefill is not None:
        more["prefill_chunk_size"] = options.prefill
    if options.kv_memory is not None:
        more["cache"] = KVCache(model, host_memory=options.kv_memory)
    device = engine_of_model(model).device.torch_device
    ends = _end_tokens(model, tokenizer)
    tokens = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=options.max_new_tokens,
        pad_token_id=pad,
        eos_token_id=ends or None,
        stopping_criteria=[progress.token_came],
        **more,
    )
    said = tokens[:, width:]
    texts = [str(one) for one in tokenizer.batch_decode(said, skip_special_tokens=True)]
    return texts, _answer_tokens(said, ends)


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the model's, which may be several; else the tokenizer's."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)


def _answer_tokens(said: torch.Tensor, ends: Sequence[int]) -> int:
    """Count the tokens of [answers, width], of each up to and with the first of ends: padding follows."""
    at_end = torch.isin(said, torch.tensor(ends, dtype=said.dtype, device=said.device)).long()
    return int((at_end.cumsum(1) - at_end == 0).sum())


class _Progress:
    """A bar on a terminal, elsewhere a line a batch; notes when the first token comes."""

    def __init__(self, prompts: int, most: int, figures: Figures, began_s: float) -> None:
        tqdm.monitor_interval = 0  # its thread would outlive the run
        self._figures, self._began_s, self._prompts = figures, began_s, prompts
        terminal = sys.stderr.isatty()
        self._bar: Any = tqdm(total=prompts * most, unit="token", dynamic_ncols=True) if terminal else None

    def __enter__(self) -> _Progress:  # noqa: PYI034 - Self is of Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def token_came(self, ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        """Move the bar by a token of each sequence; as one of transformers' stopping criteria, stop none."""
        self._figures.first_s = self._figures.first_s or time.perf_counter() - self._began_s
        if self._bar is not None:
            self._bar.update(len(ids))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def batch_over(self) -> None:
        """Say how far it is."""
        done = self._figures
        if self._bar is None:
            rate = done.tokens / max(done.seconds, 1e-9)
            sys.stderr.write(f"{done.sequences}/{self._prompts} prompts, {rate:.2f} tokens/s\n")
            sys.stderr.flush()
