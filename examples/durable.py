"""A run that a kill cannot lose: every step is committed to disk. Start it, kill it, start it again.

python examples/durable.py --nvme DIR --kill-at 8    # ends as by kill -9, in the middle of step 8
python examples/durable.py --nvme DIR                # goes on, with the same bits
"""

import argparse
import os
import signal
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

STEPS = 12
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


class Loader:
    """Batches in an order of their own, which can be taken up where it was left."""

    def __init__(self, seed: int) -> None:
        """Begin at the first batch."""
        self._random = torch.Generator().manual_seed(seed)

    def batch(self) -> torch.Tensor:
        """Return the next batch of token ids."""
        return (torch.randint(0, 64, (8, 1), generator=self._random) + 3 * torch.arange(32)) % 64

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return where it is."""
        return {"random": self._random.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on there."""
        self._random.set_state(state["random"])


def main() -> None:
    """Train what is left of twelve steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvme", help="a folder on the NVMe disk; a new temporary one by default")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="end as by kill -9 in this step")
    options = parser.parse_args()
    nvme = options.nvme or tempfile.mkdtemp(prefix="infinity-example-")

    torch.manual_seed(0)
    with infinity.Init(nvme=nvme, host_memory="64MiB", durable=True):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))
    model.to(model.device)  # its buffers, where there is a GPU
    optimizer = infinity.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = Loader(seed=1)
    optimizer.track(scheduler=schedule, loader=loader)

    done = infinity.resume(model, optimizer)
    print(f"steps already done: {done}", flush=True)
    for step in range(done + 1, STEPS + 1):
        ids = loader.batch().to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if step == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}", flush=True)
    infinity.commit(model)  # the last step, which no forward follows
    print(f"done: the run is in {nvme}")


if __name__ == "__main__":
    main()
