"""One contestant of `infinity bench long`: trains a Llama on one sequence, and prints a line of JSON.

It is started by its path, in the environment of the contestant's library, and imports infinity only for our
own contestant. The peak is how far the process's memory rose above what it took before the model was built,
as the kernel counts it: weights, gradients, the optimizer's state and activations.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F

CHECKPOINTING = {"use_reentrant": False}


def build(case: dict[str, Any]) -> Any:
    """Return the model, with random weights."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {**case["shape"], "max_position_embeddings": case["tokens"]}
    shape |= {"bos_token_id": None, "eos_token_id": None, "use_cache": False, "attn_implementation": "sdpa"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


def plain(case: dict[str, Any]) -> tuple[Any, Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Weights, gradients and moments in bf16, eight bytes a parameter."""
    model = build(case).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    return model, optimizer, lambda ids: model(input_ids=ids, labels=ids).loss


def checkpointed(case: dict[str, Any]) -> tuple[Any, Any, Callable[[torch.Tensor], torch.Tensor]]:
    """As `plain`, with each block recomputed in the backward."""
    model, optimizer, loss = plain(case)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=CHECKPOINTING)
    else:  # before transformers 5.24
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
    return model, optimizer, loss


def deepspeed(case: dict[str, Any]) -> tuple[Any, Any, Callable[[torch.Tensor], torch.Tensor]]:
    """As `checkpointed`, with the parts of DeepSpeed's ALST that need one rank alone: MLPs and the loss in
    tiles, eight of each.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    model, optimizer, _ = checkpointed(case)
    tiles = 8
    for block in model.model.layers:
        inner = type(block.mlp).forward
        parameters = list(block.mlp.parameters())

        def tiled(x: torch.Tensor, mlp: Any = block.mlp, inner: Any = inner, own: Any = parameters) -> Any:
            return TiledMLP.apply(inner, mlp, x, tiles, own)

        block.mlp.forward = tiled

    def of_tile(head: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(x).float().flatten(0, -2), y.flatten(), ignore_index=-100)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        hidden = model.model(input_ids=ids)[0]
        labels = F.pad(ids, (0, 1), value=-100)[:, 1:]
        head = model.lm_head
        found: torch.Tensor = TiledFusedLogitsLoss.apply(
            of_tile, head, hidden, labels, None, tiles, [head.weight], "mean"
        )
        return found

    return model, optimizer, loss


def infinity(case: dict[str, Any]) -> tuple[Any, Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Offloaded, with half of the budget for activations, and an eighth for host_memory."""
    from infinity import AdamW, Init

    within = case["within"]
    with Init(
        nvme=case["nvme"],
        host_memory=within // 8,
        activation_memory=within // 2,
        sequence_tiles="auto",
        loss_tiles="auto",
    ):
        model = build(case)
    model.train()
    optimizer = AdamW(model.parameters(), lr=1e-4, update="backward")
    return model, optimizer, lambda ids: model(input_ids=ids, labels=ids).loss


CONTESTANTS = {"plain": plain, "checkpointed": checkpointed, "deepspeed": deepspeed, "infinity": infinity}


def status(name: str) -> int:
    """Return a value of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def warm_up(case: dict[str, Any]) -> None:
    """Load what the first step of any model loads: libraries and the threads of their products."""
    if case["who"] == "infinity":
        from infinity import AdamW, Init  # noqa: F401 - what its import takes is not the model's
    tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = build({**case, "tokens": 64, "shape": {**tiny, "vocab_size": 64}}).to(torch.bfloat16)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()


def main() -> None:
    """Train, and print what it took; or why our own contestant's budget is too small."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    warm_up(case)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = status("VmRSS")
    ids = torch.randint(0, case["shape"]["vocab_size"], (1, case["tokens"]))
    found: dict[str, Any] = {"refused": None, "losses": [], "seconds": []}
    try:
        model, optimizer, loss_of = CONTESTANTS[case["who"]](case)
        for _ in range(case["steps"]):
            began = time.perf_counter()
            loss = loss_of(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found["seconds"].append(time.perf_counter() - began)
            found["losses"].append(float(loss.detach()))
            del loss
        found["parameters"] = sum(one.numel() for one in model.parameters())
        if case["who"] == "infinity":
            from infinity import stats

            found["decided"] = stats(model).activations
    except Exception as error:
        if type(error).__name__ != "ConfigError":
            raise
        found["refused"] = str(error)
    found["peak_nbytes"] = max(0, status("VmHWM") - before)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
