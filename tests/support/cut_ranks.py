"""What ranks do whose MLPs and losses are cut by a budget; a part of ranks_run.py."""

import torch
import torch.distributed as dist
import transformers

import infinity
import models


def trained(**settings):
    """Train on batches that are longer on each rank, in slices and without logits by the budget, twice."""
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        with infinity.Init(sequence_tiles="auto", loss_tiles="auto", **settings):
            sizes = {**models.SIZES, "intermediate_size": 512, "vocab_size": 256}
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        optimizer = infinity.AdamW(model.train().parameters(), lr=1e-2)
        losses = []
        for step, length in enumerate((520, 40, 520)):
            ids = torch.randint(
                0, 64, (1, length + 300 * dist.get_rank()), generator=torch.Generator().manual_seed(step)
            )
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(model(input_ids=ids[:, : 200 + 600 * dist.get_rank()]).logits.sum().item())
        runs.append(losses)
    return {"runs": runs, "activations": infinity.stats(model).activations}
