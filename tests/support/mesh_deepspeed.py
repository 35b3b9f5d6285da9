"""What a DeepSpeed script says of its ranks: mpu, mesh_param, autotp_size. Cases of mesh_run.py."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import infinity
from answers import error_of
from infinity.deepspeed.utils import safe_get_full_fp32_param
from infinity.reference import ReferenceAdamW, prepare

WIDTH, INNER, CLIP = 16, 32, 0.05


class _Copied(torch.autograd.Function):
    """As Megatron's: the same on all ranks; gradients are summed."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Summed(torch.autograd.Function):
    """As Megatron's: the sum of the ranks' values; gradients are the same on all."""

    @staticmethod
    def forward(ctx, values, group):
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def part(rows, columns, seed, group, dim):
    """Return this rank's part of a weight, marked as Megatron marks it; the whole without a group."""
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5
    if group is None:
        return nn.Parameter(whole)
    own = nn.Parameter(whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone())
    own.tensor_model_parallel, own.partition_dim, own.partition_stride = True, dim, 1
    return own


class Column(nn.Module):
    """Each rank has some of the outputs."""

    def __init__(self, group):
        super().__init__()
        self.group, self.weight = group, part(INNER, WIDTH, 1, group, 0)

    def forward(self, given):
        return functional.linear(
            given if self.group is None else _Copied.apply(given, self.group), self.weight
        )


class Row(nn.Module):
    """Each rank has some of the inputs; the bias is a copy."""

    def __init__(self, group):
        super().__init__()
        self.group, self.weight = group, part(WIDTH, INNER, 2, group, 1)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, given):
        own = functional.linear(given, self.weight)
        return (own if self.group is None else _Summed.apply(own, self.group)) + self.bias


class MegatronMlp(nn.Module):
    """Two layers that ranks divide, and a head of which each has a copy."""

    def __init__(self, group=None):
        super().__init__()
        self.up, self.down, self.head = Column(group), Row(group), nn.Linear(WIDTH, 4)
        nn.init.constant_(self.head.weight, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, given):
        return self.head(self.down(functional.gelu(self.up(given))))


def configuration(place, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(place.folder)},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(place.folder)},
        },
        "infinity": {"host_memory": "16MiB", "timeout_s": 30},
        **more,
    }


def given(step, number):
    drawn = torch.Generator().manual_seed(1000 * number + step)
    return torch.randn(2, 3, WIDTH, generator=drawn)


def megatron(place):
    """Train layers of an mpu's ranks; return what differs from the whole model in one process, and from its
    checkpoint there.
    """
    tensor, data = place.tensor.get_group(), place.data.get_group()
    mpu = SimpleNamespace(
        get_data_parallel_group=lambda: data,
        get_model_parallel_group=lambda: tensor,
        get_model_parallel_world_size=lambda: dist.get_world_size(tensor),
    )
    config = configuration(place)
    with infinity.deepspeed.zero.Init(config_dict_or_path=config, mpu=mpu):
        model = MegatronMlp(tensor)
    engine, optimizer, _, _ = infinity.deepspeed.initialize(model=model, config=config, mpu=mpu)
    whole = prepare(MegatronMlp(), torch.float32)
    other = ReferenceAdamW(whole.parameters(), lr=0.01, weight_decay=0.1)
    wrong, numbers = [], place.data.size()
    for step in range(4):
        loss = engine(given(step, place.data.get_local_rank())).square().mean()
        engine.backward(loss)
        engine.step()
        losses = [whole(given(step, number)).square().mean() for number in range(numbers)]
        torch.autograd.backward([one / numbers for one in losses])
        norm = torch.nn.utils.clip_grad_norm_(list(whole.parameters()), CLIP)
        other.step()
        other.zero_grad()
        wrong += [f"loss of {step}"] * (abs(float(loss) - float(losses[place.data.get_local_rank()])) > 1e-6)
        wrong += [f"norm of {step}"] * (abs(engine.get_global_grad_norm() / float(norm) - 1) > 1e-6)
    expected = dict(whole.named_parameters())
    masters = {name: safe_get_full_fp32_param(one) for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        full, dim = expected[name].detach(), getattr(one, "partition_dim", None)
        own = full if dim is None else full.chunk(place.tensor.size(), dim)[place.tensor.get_local_rank()]
        wrong += [name] * (not torch.allclose(masters[name], own.float(), rtol=1e-4, atol=1e-6))
    folder = f"{place.folder}/megatron {place.tensor.size()}"
    engine.save_checkpoint(folder, "last")
    alone = [dist.new_group([number]) for number in range(dist.get_world_size())][dist.get_rank()]
    with infinity.Init(dtype="fp32", nvme=place.folder, host_memory="16MiB", process_group=alone):
        again = MegatronMlp()
    fresh = infinity.AdamW(again.parameters(), lr=0.5)
    infinity.load(again, fresh, f"{folder}/last")
    for name, one in again.named_parameters():
        full, dim = (
            safe_get_full_fp32_param(one),
            getattr(dict(model.named_parameters())[name], "partition_dim", None),
        )
        own = full if dim is None else full.chunk(place.tensor.size(), dim)[place.tensor.get_local_rank()]
        wrong += [f"{name} loaded"] * (not torch.equal(masters[name], own))
    infinity.save(again, fresh, f"{folder} alone {dist.get_rank()}")
    infinity.load(model, optimizer, f"{folder} alone 0")
    wrong += [
        f"{name} loaded back"
        for name, one in model.named_parameters()
        if not torch.equal(safe_get_full_fp32_param(one), masters[name])
    ]
    refused = []
    for call in (
        lambda: infinity.save_pretrained(model, f"{folder} exported"),
        lambda: infinity.stream_weights(model, None),
        lambda: infinity.deepspeed.initialize(model=model, config=config),
    ):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - of many kinds
            refused.append(f"{type(error).__name__}: {error}")
    return {
        "wrong": wrong,
        "refused": refused,
        "sizes": [engine.train_batch_size(), engine.get_data_parallel_rank()],
    }


def llama():
    import transformers

    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


def ids_of(step, number):
    drawn = torch.Generator().manual_seed(1000 * number + step)
    return torch.randint(61, (2, 8), generator=drawn)


def trained(engine, number, steps=3, part=None):
    """Train; return the losses and norms."""
    found = []
    for step in range(steps):
        ids = ids_of(step, number)
        loss = engine(input_ids=ids, labels=ids).loss if part is None else part(engine, ids)
        engine.backward(loss)
        engine.step()
        found.append([float(loss.detach()), engine.get_global_grad_norm()])
    return found


def autotp(place):
    """Train a Llama by autotp_size; return what differs from the whole model in memory, and errors."""
    size = place.tensor.size()
    config = configuration(place, tensor_parallel={"autotp_size": size})
    with infinity.deepspeed.zero.Init(config_dict_or_path=config):
        model = llama()
    rows = [{"input_ids": ids_of(0, 0)[0], "labels": ids_of(0, 0)[0]}] * 8
    engine, _, loader, _ = infinity.deepspeed.initialize(model=model, config=config, training_data=rows)
    found = trained(engine, place.data.get_local_rank())
    whole = prepare(llama(), torch.float32)
    other = ReferenceAdamW(whole.parameters(), lr=0.01, weight_decay=0.1)
    expected = []
    for step in range(3):
        losses = []
        for number in range(place.data.size()):
            ids = ids_of(step, number)
            losses.append(whole(input_ids=ids, labels=ids).loss)
        (sum(losses) / len(losses)).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(whole.parameters()), CLIP)
        other.step()
        other.zero_grad()
        expected.append([float(losses[place.data.get_local_rank()]), float(norm)])
    engine.save_checkpoint(f"{place.folder}/autotp", "one")
    path, _ = engine.load_checkpoint(f"{place.folder}/autotp")

    def unplanned():
        with infinity.deepspeed.zero.Init(config_dict_or_path=config):
            nn.Linear(4, 4)

    def both():
        infinity.deepspeed.zero.Init(config_dict_or_path=config, mesh_param=(dist.get_world_size(), 1))

    return {
        "found": found,
        "expected": expected,
        "sizes": [
            engine.train_batch_size(),
            len(loader),
            engine.autotp_size(),
            engine.get_data_parallel_rank(),
        ],
        "divided": [name for name, one in model.named_parameters() if hasattr(one, "placements")],
        "loaded": path is not None,
        "unplanned": error_of(unplanned),
        "both": error_of(both),
    }


def mesh_param(place):
    """Train with sequences that all ranks share, said by mesh_param and by the JSON; return the losses."""
    ranks, found = dist.get_world_size(), []
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "sp"))
    ways = [
        ({"sequence_parallel_size": ranks}, {}, {}),
        ({}, {"mesh_param": (1, ranks)}, {"mesh_param": (1, ranks)}),
        ({}, {}, {"mesh_param": (1, ranks)}),
        ({}, {"mesh_param": mesh}, {"mesh_param": mesh}),
    ]
    for more, in_init, in_initialize in ways:
        config = configuration(place, **more)
        with infinity.deepspeed.zero.Init(config_dict_or_path=config, **in_init):
            model = llama()
        rows = [{"input_ids": ids_of(0, 0)[n], "labels": ids_of(0, 0)[n]} for n in range(2)]
        engine, _, loader, _ = infinity.deepspeed.initialize(
            model=model, config=config, training_data=rows, **in_initialize
        )
        losses = []
        for _ in range(2):
            for batch in loader:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
        found.append([losses, engine.train_batch_size()])
    config = configuration(place, sequence_parallel_size=ranks)
    return {
        "found": found,
        "numbers": error_of(
            lambda: infinity.deepspeed.zero.Init(config_dict_or_path=config, mesh_param=(ranks, 2))
        ),
        "other": error_of(
            lambda: infinity.deepspeed.zero.Init(config_dict_or_path=config, mesh_param=(ranks, 1))
        ),
        "kind": error_of(lambda: infinity.deepspeed.zero.Init(config_dict_or_path=config, mesh_param="all")),
        "no mpu": error_of(lambda: infinity.deepspeed.zero.Init(config_dict_or_path=config, mpu=object())),
        "both": error_of(
            lambda: infinity.deepspeed.zero.Init(
                config_dict_or_path=config, mpu=object(), mesh_param=(1, ranks)
            )
        ),
    }


DEEPSPEED = {"megatron": megatron, "autotp": autotp, "mesh_param": mesh_param}
