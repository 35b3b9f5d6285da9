"""`infinity merge`: a base and PEFT's adapters in, a model with the adapters merged out, streamed."""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from infinity.checkpoint.merged import write_merged
from infinity.checkpoint.trained_modules import TrainedModules
from infinity.config.settings import Config
from infinity.engine.init import Init
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

HELP = (
    "a model with PEFT's adapters merged into its base, for from_pretrained; a layer is in memory at a time"
)
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `infinity merge`."""
    parser.add_argument("base", type=Path, help="a folder of a causal language model of transformers")
    parser.add_argument("adapter", type=Path, help="a folder that PEFT, or infinity.save_pretrained, wrote")
    parser.add_argument("folder", type=Path, help="a new folder for the files")
    memory = "for what is read ahead (default: 1GiB)"
    parser.add_argument("--host-memory", default="1GiB", metavar="SIZE", help=memory)
    widen = "write a packed base (fp8, nf4, ...) in the 16 bits that it computes in"
    parser.add_argument("--widen", action="store_true", help=widen)
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: 5GB)")
    overwrite = "replace an older export in FOLDER; files beside it stay"
    parser.add_argument("--overwrite", action="store_true", help=overwrite)


def _check_adapter(folder: Path) -> list[str]:
    """Return which modules were trained whole; refuse adapters of tokens.

    Raises: ConfigError.
    """
    said = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if said.get(key := "trainable_token_indices"):
        raise ConfigError(
            f"{folder}: {key}={said[key]}: adapters of single tokens are not merged here. In memory, "
            "PEFT's model.merge_and_unload() may do it."
        )
    return list(said.get("modules_to_save") or ())


def _adapted(base: Any, folder: Path, modules: list[str]) -> tuple[Any, TrainedModules | None]:
    """Return the base with its adapters, and what else was trained: PEFT would copy `modules` of the base
    first, which needs memory for them.

    Raises: ConfigError naming what is not in the adapters' file, or not in the model.
    """
    import peft

    if not modules:
        return peft.PeftModel.from_pretrained(base, str(folder)), None
    trained = TrainedModules(base, folder, modules)
    said: Any = peft.PeftConfig.from_pretrained(str(folder))
    said.modules_to_save, said.inference_mode = None, True
    model: Any = peft.get_peft_model(base, said)
    weights = trained.adapters()
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    hollow = {name: torch.empty(one.shape, device="meta") for name, one in tensors}
    wanted = peft.get_peft_model_state_dict(model, state_dict=hollow, save_embedding_layers=False).keys()
    if lacking := wanted - weights.keys():
        raise ConfigError(f"{folder}: its file lacks {min(lacking)} and {len(lacking) - 1} others")
    put: Any = peft.set_peft_model_state_dict(model, weights)
    if unknown := put.unexpected_keys:
        raise ConfigError(f"{folder}: {min(unknown)} of its file belongs to no adapter of the base")
    return model, trained


def _type_of(base: Path, said: Any) -> str:
    """Return the dtype to compute in: the configuration's, or else that of the weights in the files.

    Raises: ConfigError for another one, and for weights of several.
    """
    name = str(getattr(said, "dtype", None) or "").removeprefix("torch.")
    found = {name} if name else _in_files(base)
    if len(found) != 1 or not found <= _TYPES.keys():
        raise ConfigError(
            f"{base}: weights of the types {', '.join(sorted(found)) or '(none found)'}, where one of "
            f"{', '.join(_TYPES)} is merged in. Name it as dtype in the config.json of the base."
        )
    return _TYPES[found.pop()]


def _in_files(base: Path) -> set[str]:
    """Return the names of the floating-point types in a folder's safetensors files."""
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
    found: set[str] = set()
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - no mapping
    return {names[one] for one in found & names.keys()}


def run(options: argparse.Namespace, console: Console) -> int:
    """Run `infinity merge`; return the exit code."""
    for folder, what in ((options.base, "config.json"), (options.adapter, "adapter_config.json")):
        if not (folder / what).is_file():
            raise ConfigError(f"{folder}: there is no {what}. Name a folder of a model, and one of adapters.")
    try:
        import peft  # noqa: F401 - see _adapted
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            "infinity merge needs transformers and peft: pip install transformers peft"
        ) from error
    modules = _check_adapter(options.adapter)
    loads: Any = AutoModelForCausalLM
    said: Any = AutoConfig.from_pretrained(options.base, local_files_only=True, trust_remote_code=False)
    config = Config(host_memory=options.host_memory, device="cpu", dtype=_type_of(options.base, said))
    with console.status(f"Writing {options.folder}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # of GPT-2's Conv1D: PEFT sets it right
        with Init(config, frozen=True):
            base = loads.from_pretrained(options.base, local_files_only=True, trust_remote_code=False)
        computes = base.dtype
        model, trained = _adapted(base, options.adapter, modules)
        dtype = computes if options.widen else None
        size, overwrite = options.max_shard_size, options.overwrite
        write_merged(model, options.folder, dtype, size, overwrite=overwrite, trained=trained)
    console.print(f"{options.folder}: weights in {computes}, with the adapters merged, for from_pretrained")
    return 0
