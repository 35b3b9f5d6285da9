"""docs/limits.md says what happens. Each refused row is tried. Nothing is faked."""

import copy
import io
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import prune

import infinity
import models
import quantised
from infinity.engine.engine import engine_of_model
from places import ROOT

PAGE = (ROOT / "docs/limits.md").read_text()
ROWS = 1 << 16
IDS = torch.zeros(2, dtype=torch.long)


def rows(title):
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


class Owner(nn.Module):
    """Has one parameter, which its forward may change."""

    def __init__(self, weight, change=None):
        super().__init__()
        self.weight, self.change = nn.Parameter(weight), change

    def forward(self, x):
        if self.change:
            with torch.no_grad():
                self.change(self.weight)
        return x @ self.weight


def without_values(dtype):
    """Build a layer as from_pretrained does, whose weight is packed."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.empty(4, 4, dtype=dtype, device="meta"), requires_grad=False)
    return layer


class Lab:
    """Builds models on NVMe, with so little memory that no parameter stays by chance, and keeps them."""

    def __init__(self, folder):
        self.folder, self.built = folder, []

    def build(self, make, **settings):
        with infinity.Init(**({"nvme": self.folder, "host_memory": "1MiB"} | settings)):
            self.built.append(make())
        return self.built[-1]

    def large(self):
        """Return an embedding that is kept in blocks of rows."""
        return self.build(lambda: nn.Sequential(nn.Embedding(ROWS, 64)))[0]

    def model(self, **settings):
        return self.build(lambda: nn.Sequential(nn.Embedding(64, 256), nn.Linear(256, 256)), **settings)

    def owner(self, weight, change=None, **settings):
        return self.build(lambda: Owner(weight, change), **settings)

    def optimizer(self, kind=infinity.AdamW, *, settings=None, **options):
        return kind(self.model(**settings or {}).parameters(), **options)

    def loss(self, model):
        return model(IDS).float().sum()


def reshaped(lab):
    model = lab.model()
    with infinity.gathered(model, write=True):
        model[1].weight.data = torch.zeros(4, 256, dtype=torch.bfloat16)


def without_logits(lab):
    """Return what a loss without logits returned, and its model."""
    model = lab.build(models.MODELS["llama"], loss_tiles=True)
    return model(input_ids=models.batch(0), labels=models.batch(0)), model


def late_logits(lab):
    output, model = without_logits(lab)
    optimizer = infinity.SGD(model.parameters(), lr=1.0)
    output.loss.backward()
    optimizer.step()
    output.logits.argmax(-1)


def changed_logits(lab):
    without_logits(lab)[0].logits.div_(2)


def distributed_parameter(lab, placement="Replicate", **settings):
    from torch.distributed import tensor

    kind = getattr(tensor, placement)()
    lab.owner(tensor.DTensor.from_local(torch.ones(4, 4), mesh("dp"), [kind], run_check=False), **settings)


def parallelized_later(lab):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = lab.build(lambda: nn.Sequential(nn.Linear(4, 4)), mesh=mesh("tp"), data=())
    parallelize_module(model, mesh("tp"), {"0": ColwiseParallel()})


def mesh_without_names(lab):
    from torch.distributed.device_mesh import DeviceMesh

    mesh("dp")
    lab.model(mesh=DeviceMesh("cpu", [0]), data=())


def quantising(lab):
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    def load():
        Bnb4BitHfQuantizer(BitsAndBytesConfig(load_in_4bit=True), pre_quantized=False).validate_environment()

    lab.build(load)


def otherwise_quantised(method, lab):
    from transformers import AutoModelForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(f"{lab.folder}/model")
    quantised.add_method(Path(lab.folder, "model"), quant_method=method)
    lab.build(lambda: AutoModelForCausalLM.from_pretrained(f"{lab.folder}/model"))


def generated_in_tiles(lab, **options):
    model = lab.build(models.MODELS["llama"])
    infinity.tile_generation_(model, sequences=2)
    model.generate(models.batch(0)[:, :4].repeat(4, 1), max_new_tokens=2, pad_token_id=0, **options)


def normed():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False)) for _ in range(2)))


def merged_into_packed(lab):
    peft = pytest.importorskip("peft")
    with infinity.Init(nvme=lab.folder, host_memory="1MiB", frozen_dtype="nf4"):
        base = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
        base.requires_grad_(False)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"]))
    infinity.save_merged(model, f"{lab.folder}/merged")


def mesh(*names):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)


def second_backward(lab):
    model = lab.model()
    optimizer = infinity.AdamW(model.parameters(), update="backward")
    for _ in range(2):
        lab.loss(model).backward()
    optimizer.step()


def assigned_behind(lab):
    model = lab.model()
    optimizer = infinity.AdamW(model.parameters(), update="backward")
    lab.loss(model).backward()
    model[1].bias.grad = torch.ones(256, dtype=torch.bfloat16)
    optimizer.step()


def zeroed_between(lab):
    model = lab.model()
    optimizer = infinity.AdamW(model.parameters(), update="backward")
    lab.loss(model).backward()
    optimizer.zero_grad(set_to_none=False)
    lab.loss(model).backward()
    optimizer.step()


def moved_to_another_rule(lab):
    model = lab.model()
    groups = [{"params": [model[1].weight]}, {"params": [model[1].bias], "use_muon": False}]
    optimizer = infinity.Muon(groups)
    lab.loss(model).backward()
    first, second = (group["params"] for group in optimizer.param_groups)
    first[0], second[0] = second[0], first[0]
    optimizer.step()


def speculating(lab, update):
    lab.optimizer(update=update, speculate=True)


def step(lab, model, optimizer):
    lab.loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def early(lab):
    """Return a model and its optimizer behind a backward that has made all updates, as "auto" may decide."""
    model = lab.model()
    optimizer = infinity.AdamW(model.parameters(), update="auto")
    for _ in range(2):
        step(lab, model, optimizer)
    engine, loss = engine_of_model(model), lab.loss(model)
    engine.arrivals.early._chosen = frozenset(engine.units)  # now: what clocks say is decided in the forward
    loss.backward()
    return model, optimizer


def early_gradients(lab):
    lab.loss(early(lab)[0]).backward()


def early_options(lab):
    _, optimizer = early(lab)
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()


def delayed(lab):
    model = lab.model(host_memory="16MiB")
    optimizer = infinity.AdamW(model.parameters(), update="delayed", delayed_after=0)
    step(lab, model, optimizer)
    return model, optimizer


def delayed_slices(lab):
    infinity.AdamW(lab.large().parameters(), update="delayed")


def delayed_without_room(lab):
    model = lab.build(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))))
    optimizer = infinity.AdamW(model.parameters(), update="delayed", delayed_after=0)
    for _ in range(3):
        model(torch.ones(2, 512, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class TwoWays(nn.Module):
    """A block of two layers, and an output of each."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.left(x), self.right(x)


def backwards_of_parts(lab):
    model = lab.build(lambda: nn.ModuleList([TwoWays()]), units="block")
    optimizer = infinity.AdamW(model.parameters(), update="backward")
    for one in model[0](torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)):
        one.sum().backward()
    optimizer.step()


def clipped_twice(lab):
    model = lab.model()
    optimizer = infinity.AdamW(model.parameters(), max_norm=1.0)
    lab.loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def with_a_stranger(lab):
    infinity.AdamW([*lab.model().parameters(), *nn.Linear(4, 4).parameters()])


def resized(lab):
    lab.build(models.MODELS["llama"]).resize_token_embeddings(80)


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh("dp"))


def functional(parameters, model):
    return torch.func.functional_call(model, parameters, (IDS,)).float().sum()


def in_init(do):
    return lambda lab: lab.build(lambda: do(lab))


def wrapped(name, **options):
    return lambda lab: lab.optimizer(
        partial(infinity.wrap_optimizer, getattr(torch.optim, name)), lr=1e-3, **options
    )


def t5():
    import transformers

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def eager():
    model = models.MODELS["llama"]()
    model.set_attn_implementation("eager")
    return model


def leaving_tokens_out(change, lab):
    model = lab.build(models.MODELS["llama"])
    change(model)
    infinity.RandomLTD(model, 4, 8, steps=2, multiple=1)
    model(input_ids=models.batch(0))


INT8 = {"state_dtype": "int8"}
FP24 = {"master_dtype": "fp24"}
TRIED = {
    "`torch.compile(model)`, `model.compile()`": [
        lambda lab: torch.compile(lab.model(), backend="eager")(IDS),
        lambda lab: (lab.model().compile(backend="eager"), lab.built[-1](IDS)),
    ],
    "`torch.jit.script`, `torch.jit.trace`": [
        lambda lab: torch.jit.script(lab.model()),
        lambda lab: torch.jit.trace(lab.model(), IDS),
    ],
    "`torch.export.export`": [lambda lab: torch.export.export(lab.model(), (IDS,))],
    "`copy.deepcopy(model)`, `pickle`, `torch.save(model)`": [
        lambda lab: copy.deepcopy(lab.model()),
        lambda lab: pickle.dumps(lab.model()),
        lambda lab: torch.save(lab.model(), io.BytesIO()),
    ],
    "`AveragedModel(model)` after `Init`": [lambda lab: torch.optim.swa_utils.AveragedModel(lab.model())],
    "`.half()`, `.double()`, `.to()` of another type after `Init`": [
        lambda lab: lab.model().half(),
        lambda lab: lab.model().double(),
        lambda lab: lab.model().to(torch.float16),
    ],
    "values outside forward and backward: `p.norm()`, `p.data`, `parameters_to_vector`": [
        lambda lab: lab.model()[1].weight.norm(),
        lambda lab: lab.model()[1].weight.data + 1,
        lambda lab: nn.utils.parameters_to_vector(lab.model().parameters()),
    ],
    "`torch.autograd.grad` with respect to parameters": [
        lambda lab: torch.autograd.grad(lab.loss(lab.model()), lab.built[-1][1].weight)
    ],
    "a parameter changed in its forward": [
        lambda lab: lab.owner(torch.ones(256, 256), lambda weight: weight.mul_(0.5))(
            torch.ones(2, 256, dtype=torch.bfloat16)
        )
    ],
    "another shape in `gathered(..., write=True)`": [reshaped],
    "the weight of an embedding that is [in blocks of rows](tiling.md#rows-of-embeddings): `weight.grad`, "
    "hooks, another Parameter in its place, tied after `Init`": [
        lambda lab: setattr(lab.large().weight, "grad", torch.zeros(ROWS, 64)),
        lambda lab: lab.large().weight.register_hook(print),
        lambda lab: setattr(lab.large(), "weight", nn.Parameter(torch.zeros(ROWS, 64))),
        lambda lab: setattr(nn.Linear(64, ROWS, bias=False), "weight", lab.large().weight),
    ],
    "`resize_token_embeddings`, pruning, parametrizations after `Init`": [
        resized,
        lambda lab: prune.l1_unstructured(lab.model()[1], "weight", 0.5),
        lambda lab: nn.utils.parametrizations.weight_norm(lab.model()[1]),
    ],
    "`share_memory()`": [lambda lab: lab.model().share_memory()],
    "`activation_memory` for blocks with batch norms": [
        lambda lab: lab.build(normed, activation_memory="1MiB")(torch.ones(4, 8, dtype=torch.bfloat16)),
    ],
    "`activation_memory` for a model without blocks": [lambda lab: lab.model(activation_memory="1MiB")],
    "`sequence_tiles` by a number where no MLP is known, `loss_tiles=True` where no causal loss is": [
        lambda lab: lab.model(sequence_tiles=2),
        lambda lab: lab.model(loss_tiles=True),
    ],
    "logits of a loss without logits, used after the step or changed in place": [late_logits, changed_logits],
    "FSDP (`fully_shard`) of a model built in `Init`": [lambda lab: sharded(lab.model())],
    "`torch.func.grad`, `vjp`, `jacrev` of the model's own parameters": [
        lambda lab: torch.func.grad(functional)(dict(lab.model().named_parameters()), lab.built[-1]),
        lambda lab: torch.func.vjp(
            partial(functional, model=lab.model()), dict(lab.built[-1].named_parameters())
        ),
        lambda lab: torch.func.jacrev(functional)(dict(lab.model().named_parameters()), lab.built[-1]),
    ],
    "`tile_generation_` with a static cache, one without layers, or with states of linear attention; tiles "
    "that cut through beams": [
        partial(generated_in_tiles, cache_implementation="static"),
        partial(generated_in_tiles, past_key_values=transformers.DynamicCache()),
        partial(generated_in_tiles, num_beams=3),
    ],
    "DTensor parameters without a mesh, of another mesh than that of `Init`, along its data's dimensions, or "
    "placed as `Partial`": [
        distributed_parameter,
        lambda lab: distributed_parameter(lab, "Partial", mesh=mesh("tp"), data=()),
    ],
    "a mesh without names, or without the dimension that `data` names; a mesh beside a `process_group`": [
        mesh_without_names,
        lambda lab: lab.model(mesh=mesh("dp", "tp"), data="dq"),
        lambda lab: lab.model(mesh=mesh("dp"), data="dp", process_group=mesh("dp")),
    ],
    "making DTensors of a model after `Init`": [parallelized_later],
    "a DeviceMesh of three dimensions or more as `process_group`": [
        lambda lab: lab.model(process_group=mesh("dp", "tp", "pp"))
    ],
    "`sequence_parallel` of encoder-decoders, of layers that mix tokens outside of attention, with eager or "
    "flash attention": [
        lambda lab: infinity.sequence_parallel(lab.build(t5), 1),
        lambda lab: infinity.sequence_parallel(lab.model(), 1),
        lambda lab: infinity.sequence_parallel(lab.build(eager), 1),
    ],
    "`RandomLTD` of a model without blocks, of blocks in slices, with flash or flex attention, or of "
    "sequences that ranks share": [
        lambda lab: infinity.RandomLTD(lab.model(), 4, 8, steps=2, multiple=1),
        partial(leaving_tokens_out, lambda model: infinity.tiling.tile_batch_(model, 1)),
        partial(leaving_tokens_out, lambda model: model.set_attn_implementation("flex_attention")),
        partial(leaving_tokens_out, lambda model: infinity.sequence_parallel(model, 1)),
    ],
    "`SparseAttention` of encoder-decoders, with eager or flash attention, of sequences that ranks share, "
    "and with a mask of queries and keys": [
        lambda lab: infinity.SparseAttention(lab.build(t5)),
        lambda lab: infinity.SparseAttention(lab.build(eager)),
        lambda lab: infinity.SparseAttention(lab.build(eager), implementation="flash_attention_2"),
        lambda lab: (
            infinity.sequence_parallel(lab.build(models.MODELS["llama"]), 1),
            infinity.SparseAttention(lab.built[-1], implementation="sdpa"),
        ),
        lambda lab: (
            infinity.SparseAttention(lab.build(models.MODELS["llama"])),
            lab.built[-1](input_ids=models.batch(0), attention_mask=torch.ones(2, 1, 16, 16)),
        ),
    ],
    "`shared_memory` with `quantized_weights`, `secondary_shard` or `expert_parallel`": [
        lambda lab: lab.model(shared_memory=True, quantized_weights="int8"),
        lambda lab: lab.model(shared_memory=True, secondary_shard=2),
        lambda lab: lab.model(shared_memory=True, expert_parallel=2),
    ],
    '`expert_parallel` on an accelerator, with `experts="whole"`, or where it does not divide the ranks': [
        lambda lab: lab.model(expert_parallel=2, device="cuda"),
        lambda lab: lab.model(expert_parallel=2, experts="whole"),
        lambda lab: lab.model(expert_parallel=2),
    ],
    "complex, fp64 and fp8 parameters": [
        lambda lab: lab.owner(torch.ones(4, 4, dtype=torch.complex64)),
        lambda lab: lab.owner(torch.ones(4, 4, dtype=torch.float64)),
        lambda lab: lab.owner(torch.ones(4, 4).to(torch.float8_e4m3fn)),
    ],
    "checkpoints quantised by other methods (GPTQ, AWQ, torchao, unknown ones)": [
        partial(otherwise_quantised, one) for one in ("gptq", "awq", "torchao", "unknown")
    ],
    "`save_merged` of a packed base without `dtype`": [merged_into_packed],
    "packed weights of a quantised model (uint8, int8, fp8 without values)": [
        lambda lab: lab.build(partial(without_values, torch.uint8)),
        lambda lab: lab.build(partial(without_values, torch.int8)),
        lambda lab: lab.build(partial(without_values, torch.float8_e4m3fn)),
    ],
    "`BitsAndBytesConfig` for a checkpoint in 16 bits, inside `Init`": [quantising],
    "`frozen_dtype` where nothing is frozen when `Init` ends, or without a folder on NVMe": [
        lambda lab: lab.model(frozen_dtype="nf4", nvme="."),
        lambda lab: lab.model(frozen_dtype="int8", nvme=None),
    ],
    "optimizers of torch over offloaded parameters, LBFGS and Muon among them": [
        lambda lab: lab.optimizer(torch.optim.AdamW),
        lambda lab: lab.optimizer(torch.optim.LBFGS),
        lambda lab: torch.optim.Muon([lab.model()[1].weight]),
    ],
    "`wrap_optimizer` of LBFGS, SparseAdam, NAdam": [
        wrapped("LBFGS"),
        wrapped("SparseAdam"),
        wrapped("NAdam"),
    ],
    "`wrap_optimizer` of Muon": [wrapped("Muon")],
    "`Muon` of weights that are cut into tiles, or blocks of rows": [
        lambda lab: infinity.Muon([lab.large().weight]),
        lambda lab: infinity.Muon(list(lab.large().parameters())),
    ],
    "`Muon` of vectors, and of tensors of more than three dimensions": [
        lambda lab: lab.optimizer(infinity.Muon),
        lambda lab: infinity.Muon(lab.build(lambda: nn.Conv2d(3, 4, 3)).parameters()),
    ],
    "`amsgrad=True`": [lambda lab: lab.optimizer(amsgrad=True)],
    '`state_dtype` with `wrap_optimizer`: of the centered RMSprop; `"int4"` of two tensors, but Adam\'s': [
        wrapped("RMSprop", centered=True, settings=INT8),
        wrapped("Adadelta", settings={"state_dtype": "int4"}),
    ],
    '`master_dtype="fp24"` with fp16 or fp32': [
        lambda lab: lab.model(dtype="fp16", **FP24),
        lambda lab: lab.model(dtype="fp32", **FP24),
    ],
    '`master_dtype="fp24"` with other optimizers than AdamW and Adam': [
        lambda lab: lab.optimizer(infinity.Lion, settings=FP24),
        lambda lab: infinity.Muon([lab.model(**FP24)[0].weight]),
        wrapped("RMSprop", settings=FP24),
    ],
    "`speculate=True` without NVMe, on several ranks, in stages 1 and 2": [
        lambda lab: lab.optimizer(speculate=True, settings={"nvme": None, "host_memory": "16MiB"}),
        lambda lab: lab.optimizer(speculate=True, settings={"stage": 2}),
    ],
    '`speculate=True` with `update="backward"`, `"auto"` or `"delayed"`': [
        partial(speculating, update=update) for update in ("backward", "auto", "delayed")
    ],
    '`update="auto"`: a second backward before `step()`, or options of param groups changed between the '
    "backward and it, for the first time behind early updates": [early_gradients, early_options],
    '`update="delayed"` with fp16, on several ranks, on an accelerator, or with slices': [
        lambda lab: lab.optimizer(update="delayed", settings={"dtype": "fp16"}),
        delayed_slices,
    ],
    '`update="delayed"` without room for the gradients of two steps in `host_memory`': [delayed_without_room],
    '`infinity.save` and `state_dict()` while `update="delayed"` keeps gradients': [
        lambda lab: infinity.save(*delayed(lab), lab.folder / "saved"),
        lambda lab: delayed(lab)[1].state_dict(),
    ],
    '`update="backward"` with fp16': [
        lambda lab: lab.optimizer(update="backward", settings={"dtype": "fp16"})
    ],
    '`update="backward"` with `max_norm`': [lambda lab: lab.optimizer(update="backward", max_norm=1.0)],
    '`update="backward"` and a second backward before `step()`': [second_backward],
    '`update="backward"`: a gradient assigned behind its update, or set to zeros in place between two '
    "backwards": [assigned_behind, zeroed_between],
    "a parameter moved to a param group of another update rule, as of Muon's from `use_muon` True to False": [
        moved_to_another_rule
    ],
    '`update="backward"` with `units="block"` and two backwards, each through a part of one block': [
        backwards_of_parts
    ],
    "`max_norm` and `clip_grad_norm_` together": [clipped_twice],
    "parameters built outside `Init` in the same optimizer": [with_a_stranger],
    "`Init` inside `Init`, an optimizer inside `Init`": [
        in_init(lambda lab: lab.model()),
        in_init(lambda lab: infinity.AdamW(nn.Linear(4, 4).parameters())),
    ],
    "a device of another type than CPU, CUDA, `xpu`, `mtia`, `hpu` and `npu`; one that torch does not see": [
        lambda lab: lab.model(device="tpu"),
        lambda lab: lab.model(device="xpu"),
    ],
    "`infinity.snapshot` of a run that is not durable": [
        lambda lab: infinity.snapshot(lab.model(), lab.folder / "snapshot")
    ],
}
CASES = [
    pytest.param(what, number, id=f"{what} {number}".replace("`", ""))
    for what, tries in TRIED.items()
    for number in range(len(tries))
]


@pytest.fixture
def lab(folder):
    from torch import distributed

    yield Lab(folder)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_every_refused_row_is_tried_here():
    assert [what for what, _, _ in rows("Refused")] == list(TRIED)


@pytest.mark.disk
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("what", "number"), CASES)
@pytest.mark.usefixtures("three_layers")
def test_what_is_refused_raises_what_the_page_says(lab, what, number):
    (said,) = (error.strip("`") for row, error, _ in rows("Refused") if row == what)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - which one is compared below
        TRIED[what][number](lab)
    assert type(raised.value).__name__ == said
    assert len(str(raised.value)) > 20


def test_what_is_supported_is_shown_by_tests_that_exist():
    named = [re.findall(r"`(tests/[\w/.]+)`", shown) for _, shown in rows("Supported")]
    assert all(named)
    assert [path for paths in named for path in paths if not (ROOT / path).is_file()] == []
