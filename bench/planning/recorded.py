"""Traces of routing that a model makes which was trained here, on real text: which experts each step uses.

    python -m infinity.bench.planning.recorded --nvme DIR --json experts-recorded.json

trains a small Qwen3-MoE (4 layers of 64 experts, two for each token, with its loss that balances them) for
2,000 steps on the bytes of the standard library's sources, in memory, in about five minutes of a CPU. Then it
writes what `infinity bench experts --recorded FILE` reads: of every step of a further training with few
tokens, and of every token of text that the model reads one by one, the slices that are used. A slice is an
expert of a layer: its number is layer * experts + expert.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from infinity.bench.arguments import positive
from infinity.bench.findings import Column, Findings, asked, command, run_command
from infinity.errors import ConfigError

LAYERS, EXPERTS = 4, 64
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "output_router_logits": True,
}
_LENGTH, _SEQUENCES = 64, 4
_FEW = 16
"""Tokens of a step that is recorded."""
_HELD_BACK = 1 << 20
"""Bytes at the end of the text that the first training does not see."""


def text_of_library() -> torch.Tensor:
    """Return the bytes of the standard library's modules, in order of their names, as ids.

    Raises: ConfigError where its sources are not there.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    ids = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(ids) < 2 * _HELD_BACK:
        raise ConfigError(f"{folder} has {len(ids)} bytes of *.py files: a Python with its sources is needed")
    return torch.frombuffer(bytearray(ids), dtype=torch.uint8).long()


def batches(text: torch.Tensor, sequences: int, length: int, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of random stretches of the text."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        begins = torch.randint(0, len(text) - length, (sequences,), generator=random)
        yield torch.stack([text[one : one + length] for one in begins.tolist()])


class Recorder:
    """Notes the slices that the routers of a model choose."""

    def __init__(self, model: nn.Module) -> None:
        """Follow the routers of `model`, in its order."""
        self._used: set[int] = set()
        routers = [one for name, one in model.named_modules() if name.endswith("mlp.gate")]
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda _, __, found, layer=layer: self._note(layer, found[2]))

    def _note(self, layer: int, chosen: torch.Tensor) -> None:
        self._used.update(layer * EXPERTS + one for one in chosen.unique().tolist())

    def taken(self) -> list[int]:
        """Return the slices that were chosen since the last call, in order."""
        used, self._used = sorted(self._used), set()
        return used


def train(model: Any, optimizer: torch.optim.Optimizer, some: Iterator[torch.Tensor]) -> Iterator[float]:
    """Train a step on each batch; yield its loss."""
    for ids in some:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def record(steps: int, recorded: int) -> dict[str, Any]:
    """Train, and return the traces and the losses."""
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES))
    model.set_experts_implementation("grouped_mm")  # many small experts in one call
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = text_of_library()
    seen, held = text[:-_HELD_BACK], text[-_HELD_BACK:]
    losses = list(train(model, optimizer, batches(seen, _SEQUENCES, _LENGTH, steps, 0)))
    recorder = Recorder(model)
    for group in optimizer.param_groups:
        group["lr"] = 2e-4
    training = [recorder.taken() for _ in train(model, optimizer, batches(held, 1, _FEW, recorded, 1))]
    model.train(mode=False)
    reading, past = [], None
    with torch.no_grad():
        for number in range(4 * recorded):
            if number % (4 * _LENGTH) == 0:
                past = None  # another document, as each request of a server is
                begin = int(torch.randint(0, len(held) - 4 * _LENGTH, (), generator=_seeded(number)))
            at = begin + number % (4 * _LENGTH)
            past = model(
                input_ids=held[None, at : at + 1], past_key_values=past, use_cache=True
            ).past_key_values
            reading.append(recorder.taken())
    mean = sum(losses[-100:]) / len(losses[-100:])
    runs = {f"recorded, training of {_FEW} tokens": training, "recorded, token by token": reading}
    return {"slices": LAYERS * EXPERTS, "steps": steps, "loss": mean, "runs": runs}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def packed(run: Sequence[Sequence[int]]) -> str:
    """Return a run as text: two hexadecimal digits for each slice, steps apart by spaces."""
    return " ".join("".join(f"{one:02x}" for one in step) for step in run)


def unpacked(text: str) -> list[list[int]]:
    """Return what `packed` was given.

    Raises: ValueError for a text in which nothing is used.
    """
    run = [[int(step[at : at + 2], 16) for at in range(0, len(step), 2)] for step in text.split(" ")]
    if not any(run):
        raise ValueError("nothing is used in a trace")
    return run


def recorded_runs(file: Path) -> dict[str, list[list[int]]]:
    """Return the traces in a file that this command has written, by name.

    Raises: ConfigError for another file; OSError.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        return {row["trace"]: unpacked(row["run"]) for row in rows}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: not what `python -m infinity.bench.planning.recorded --json` writes ({error})"
        ) from error


def _measure(options: argparse.Namespace, _folder: Path, console: Console) -> Findings:
    with console.status(f"training {options.steps} steps"):
        found = record(options.steps, options.recorded)
    rows = [
        {"trace": name, "steps": len(run), "uses": sum(map(len, run)), "run": packed(run)}
        for name, run in found["runs"].items()
    ]
    return Findings(
        title=f"Slices that a model of {found['slices']} uses",
        rows=rows,
        columns=[Column("trace", "trace"), Column("steps", "steps"), Column("uses", "uses")],
        verdicts=[f"loss after {found['steps']} steps: {found['loss']:.2f} a byte"],
        options=asked(options),
    )


def main(arguments: list[str] | None = None) -> None:
    """Train, record, and write."""
    parser = command("planning.recorded", "traces of routing by a model that was trained here")
    parser.add_argument("--steps", type=positive, default=2000, help="of the training before; 2000")
    parser.add_argument("--recorded", type=positive, default=240, help="steps to record; 240")
    run_command(parser, arguments, _measure)


if __name__ == "__main__":
    main()
