"""PEFT's adapters of layers that are divided over a mesh: a case of mesh_run.py."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import infinity
from answers import error_of


def whole(one):
    return one.full_tensor() if isinstance(one, DTensor) else one.clone()


def divided(model, place, mesh_run):
    """Divide a model with its adapters: of q by its outputs, and of down by its inputs."""
    inner = model.base_model.model
    parallelize_module(inner, place.tensor, mesh_run.OUTSIDE)
    adapted = {
        "q.base_layer": ColwiseParallel(),
        "q.lora_B.default": ColwiseParallel(),
        "down.base_layer": RowwiseParallel(),
        "down.lora_A.default": RowwiseParallel(),
    }
    plain = {name: style for name, style in mesh_run.IN_BLOCK.items() if name not in ("q", "down")}
    for block in inner.blocks:
        parallelize_module(block, place.tensor, plain | adapted)
    return model


def adapted(place, mesh_run):
    """Train adapters, and save them; return what their files lack, and the errors of what is not done."""
    import peft

    def built(model):
        torch.manual_seed(5)
        config = peft.LoraConfig(target_modules=["q", "down"], r=4, lora_alpha=8, init_lora_weights=False)
        return peft.get_peft_model(model, config)

    settings = {"nvme": place.folder, "host_memory": mesh_run.WIDE, "dtype": "fp32"}
    with infinity.Init(mesh=place.mesh, data="dp", **settings):
        model = divided(built(mesh_run.MeshModel()), place, mesh_run)

    def other_order():
        with infinity.Init(mesh=place.mesh, data="dp", **settings):
            return built(mesh_run.parallel(mesh_run.MeshModel(), place.tensor))

    optimizer = infinity.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    losses, _ = mesh_run.train(place, model, optimizer)
    folder = Path(place.folder, "adapters")
    infinity.save_pretrained(model, folder)
    expected = {
        name.replace(".default", ""): whole(one) for name, one in model.state_dict().items() if "lora" in name
    }
    files = load_file(folder / "adapter_model.safetensors")
    alone = peft.PeftModel.from_pretrained(mesh_run.MeshModel(), str(folder)).state_dict()
    peft.set_peft_model_state_dict(model, {name: 2 * one for name, one in files.items()})
    loaded = model.state_dict()
    answer = {
        "divided": sum(isinstance(one, DTensor) for name, one in model.named_parameters() if "lora" in name),
        "lost": [name for name in expected | files if not torch.equal(expected[name], files[name])],
        "alone": [
            name
            for name, one in alone.items()
            if "lora" in name and not torch.equal(one, expected[name.replace(".default", "")])
        ],
        "loaded": [
            name
            for name, one in loaded.items()
            if "lora" in name and not torch.equal(whole(one), 2 * files[name.replace(".default", "")])
        ],
        "learnt": losses[-1] != losses[0],
        "merged": error_of(lambda: infinity.save_merged(model, folder / "merged")),
        "other order": error_of(other_order),
        "left": (folder / "merged").exists(),
    }
    dist.barrier()
    return answer
