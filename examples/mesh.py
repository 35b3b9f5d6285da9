"""Data, tensor, pipeline and expert parallelism together, on a mesh of ranks: torch's, but for the state.

torchrun --nproc-per-node 8 examples/mesh.py --dp 2 --tp 2 --pp 2         # a Llama
torchrun --nproc-per-node 8 examples/mesh.py --dp 4 --pp 2 --ep 2         # a Mixtral, experts divided

The product of dp, tp and pp is the number of processes; ep divides dp. The model, its data and the global
batch are the same on every mesh, and so are its losses, but for the order of sums.
"""

import argparse
import tempfile

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

import infinity

BATCH, TOKENS, MICRO_BATCHES, STEPS = 8, 16, 2, 8
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
}
LLAMA = LlamaConfig(**SIZES)
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=4, experts_implementation="eager")
IN_ATTENTION = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
}
IN_MLP = {
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}


class Stage(nn.Module):
    """Some layers of a model; the first stage has the embedding as well, the last the head."""

    def __init__(self, number: int, stages: int, *, experts: bool) -> None:
        """Build stage `number` of `stages`. What is drawn does not depend on how many there are."""
        super().__init__()
        last, each = number == stages - 1, LLAMA.num_hidden_layers // stages
        torch.manual_seed(1000)
        self.embedding = nn.Embedding(LLAMA.vocab_size, LLAMA.hidden_size) if number == 0 else None
        layers = []
        for index in range(number * each, (number + 1) * each):
            torch.manual_seed(index)
            layers.append(MixtralDecoderLayer(MIXTRAL, index) if experts else LlamaDecoderLayer(LLAMA, index))
            if experts:  # which transformers leaves uninitialized
                mlp = layers[-1].mlp
                for weight in (mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj):
                    nn.init.normal_(weight, std=0.1)
        self.layers = nn.ModuleList(layers)
        self.rotary = LlamaRotaryEmbedding(LLAMA)
        torch.manual_seed(2000)
        self.norm = LlamaRMSNorm(LLAMA.hidden_size) if last else None
        self.head = nn.Linear(LLAMA.hidden_size, LLAMA.vocab_size, bias=False) if last else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Token ids, or the stage before's output, to this one's; the last stage's are logits."""
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        turned = self.rotary(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=turned)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def cut(stage: Stage, mesh: DeviceMesh) -> None:
    """Divide a stage's weights among the ranks of tensor parallelism."""
    for layer in stage.layers:
        parallelize_module(layer, mesh, IN_ATTENTION)
        if not isinstance(layer, MixtralDecoderLayer):  # whose experts stay whole, or are divided by --ep
            parallelize_module(layer, mesh, IN_MLP)
    if stage.embedding is not None:
        parallelize_module(stage.embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if stage.head is not None:
        parallelize_module(stage.head, mesh, ColwiseParallel(output_layouts=Replicate()))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch's next tokens."""
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def train(mesh: DeviceMesh, nvme: str, expert_ranks: int) -> None:
    """Train a few steps; the ranks with the last stage print the loss of the whole batch."""
    number, stages, data = mesh["pp"].get_local_rank(), mesh["pp"].size(), mesh["dp"]
    ranks = max(1, expert_ranks)
    config = infinity.Config(nvme=[nvme], host_memory="64MiB", device="cpu", expert_parallel=ranks)
    with infinity.Init(config, mesh=mesh["dp", "tp"], data="dp", pipeline_group=mesh["pp"].get_group()):
        stage = Stage(number, stages, experts=expert_ranks > 0)
        if mesh["tp"].size() > 1:
            cut(stage, mesh["tp"])
    optimizer = infinity.AdamW(stage.parameters(), lr=3e-3, max_norm=1.0)  # the norm of all ranks' gradients
    staged = pipelining.PipelineStage(
        stage, number, stages, torch.device("cpu"), group=mesh["pp"].get_group()
    )
    schedule = pipelining.Schedule1F1B(staged, MICRO_BATCHES, loss_fn=loss_of)

    random = torch.Generator().manual_seed(0)
    for step in range(1, STEPS + 1):
        rows = (torch.randint(0, 64, (BATCH, 1), generator=random) + 3 * torch.arange(TOKENS)) % 64
        ids = rows.chunk(data.size())[data.get_local_rank()]
        losses: list[Tensor] = []
        schedule.step(*([ids] if number == 0 else []), target=ids, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if number == stages - 1:
            loss = torch.stack(losses).mean().detach()
            distributed.all_reduce(loss, group=data.get_group())
            if data.get_local_rank() == mesh["tp"].get_local_rank() == 0:
                print(f"step {step}: loss {loss.item() / data.size():.4f}", flush=True)


def main() -> None:
    """Make the mesh and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, what in (
        ("dp", "have different data"),
        ("tp", "divide each weight"),
        ("pp", "have a stage each"),
    ):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"how many ranks {what}")
    parser.add_argument("--ep", type=int, default=0, help="how many ranks divide the experts; 0: no experts")
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on each machine's NVMe disk")
    options = parser.parse_args()
    sizes = options.dp, options.tp, options.pp
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "pp"))
    train(mesh, options.nvme, options.ep)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
