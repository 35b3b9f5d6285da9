"""deepspeed.zero: Init and GatheredParameters, with DeepSpeed's arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import nn

from infinity.config.settings import Config
from infinity.deepspeed.calls import missing
from infinity.deepspeed.groups import Divided, by_configuration, divided
from infinity.deepspeed.launch import Settings, ranks, settings_of
from infinity.engine import init as plain
from infinity.engine.engine import Engine, engine_of
from infinity.engine.gathered import gathered
from infinity.engine.sequences import models_of_transformers
from infinity.errors import ConfigError, UnsupportedError
from infinity.huggingface.plans import tensor_parallel
from infinity.tensors import as_bytes
from infinity.units.released import expect_optimizers_of_torch

Source = str | Path | Mapping[str, Any] | Settings


class ZeroInit:
    """infinity.Init with DeepSpeed's arguments: build the model inside the `with`.

    config_dict_or_path: DeepSpeed's JSON, or its content; None for host memory alone. module: a model that
    was built before, to be offloaded now, without a `with`. enabled: False: do nothing. remote_device:
    "nvme" needs an nvme_path in the configuration. dtype: the configuration's. strict: refuse unsupported
    keys of the configuration; False warns of them and leaves them out. zero_quantized_nontrainable_weights:
    as the configuration's key of that name, Config(frozen_dtype="int8"). zero_quantized_weights: likewise,
    Config(quantized_weights="int8"). data_parallel_group, sequence_data_parallel_group, mpu and mesh_param:
    which ranks share the model's data, see [Note: who divides what] in groups. With
    tensor_parallel.autotp_size in the configuration, layers of transformers' models are divided by the
    models' own plans when the `with` ends. The other arguments have no effect.

    Raises: ConfigError, UnsupportedError; on entering, what infinity.Init raises.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Source | None = None,
        config: Source | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        *,
        mesh_param: Any = None,
        strict: bool = True,
    ) -> None:
        """Check the settings; take `module` in."""
        if zero_param_parallel_group:
            raise UnsupportedError(
                f"zero.Init(zero_param_parallel_group={zero_param_parallel_group!r}) is not supported; leave "
                "it out: all ranks that share data partition alike"
            )
        self._init: plain.Init | None = None
        self._tensor: Any = None
        if not enabled:
            return
        source = config_dict_or_path if config_dict_or_path is not None else config
        split = divided(mpu, mesh_param, sequence_data_parallel_group or data_parallel_group)
        said, split = _read(source, split, strict=strict)
        settings = said.config if said is not None else _plainly(split, dtype)
        freezes = said is not None and said.freezes
        if zero_quantized_nontrainable_weights and settings.frozen_dtype is None:
            settings = dataclasses.replace(settings, frozen_dtype="int8")
        if zero_quantized_weights:
            settings = dataclasses.replace(settings, quantized_weights="int8")
        if dtype is not None and settings.dtype != Config(dtype=dtype).dtype:
            raise ConfigError(f"zero.Init(dtype={dtype}), but the configuration says {settings.dtype}")
        if remote_device == "nvme" and not settings.nvme_folders:
            raise ConfigError('zero.Init(remote_device="nvme") needs an nvme_path in the configuration')
        self._init = plain.Init(settings, frozen=freezes, **(split.init if split is not None else {}))
        if said is not None and said.tensor_parallel > 1 and split is not None:
            self._tensor = split.init["mesh"]["tensor"]
        if module is not None:
            take_in(module, settings, frozen=freezes)

    def __enter__(self) -> None:
        """See infinity.Init."""
        if self._init is not None:
            engine = self._init.__enter__().engine
            if engine is not None:
                expect_optimizers_of_torch(engine)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See infinity.Init; divide layers, if the configuration says so."""
        if self._init is None:
            return
        try:
            if kind is None and self._tensor is not None:
                for model in _planned(self._init.models):
                    tensor_parallel(model, self._tensor)
        except BaseException:
            self._init.__exit__(*sys.exc_info())
            raise
        self._init.__exit__(kind, error, trace)


def _read(
    source: Source | None, split: Divided | None, *, strict: bool
) -> tuple[Settings | None, Divided | None]:
    """Return what a configuration says, if there is one, and how it and the script divide the ranks."""
    if source is None:
        return None, split
    count, sharers = (len(split.data), split.sequences) if split is not None else (None, None)
    said = settings_of(source, strict=strict, data_ranks=count, sequences=sharers)
    return said, by_configuration(split, said, builds=True)


def _plainly(split: Divided | None, dtype: torch.dtype | None) -> Config:
    """Return the settings of a script without a configuration."""
    sharers = split.sequences if split is not None else None
    return Config(dtype=dtype or "bf16", sequence_parallel=sharers or 1)


def _planned(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the models of transformers. Raises: ConfigError if there is none."""
    found = models_of_transformers(models)
    if not found:
        raise ConfigError(
            "tensor_parallel.autotp_size: no model of transformers was built inside this zero.Init, and "
            "others have no plan by which their layers would be divided. infinity.Init(mesh=..., data=...) "
            "and torch's parallelize_module divide any model"
        )
    return found


Init = ZeroInit
"""The name that scripts use: zero.Init."""


def take_in(model: nn.Module, config: Config, *, frozen: bool = False) -> None:
    """Offload a model that was built in memory, as if it had been built inside Init.

    Its Parameter objects stay the same; their values move to the tiers of `config`, module by module. frozen:
    they get requires_grad=False.

    Raises: what Init raises; UnsupportedError on several ranks; ValueError for a model that was built in Init
    in part.
    """
    if any(engine_of(parameter) is not None for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__}: a part of it was built inside Init; build the whole model there, once"
        )
    if ranks() > 1:
        raise UnsupportedError(
            f"{type(model).__name__} was built in memory, by each of {ranks()} ranks: build it inside "
            "`with infinity.deepspeed.zero.Init(...):`, where all draw the same values"
        )
    if frozen:
        model.requires_grad_(False)
    with plain.Init(config) as building:
        if building.engine is not None:
            expect_optimizers_of_torch(building.engine)
        building.take_in(model)


@contextlib.contextmanager
def GatheredParameters(
    params: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Any:
    """infinity.gathered with DeepSpeed's arguments. With a modifier_rank, the changes of that rank are kept,
    on every rank; every rank enters and leaves the `with`.

    Parameters that are not offloaded are left alone. fwd_module has no effect.

    Raises: what infinity.gathered raises; ValueError for a modifier_rank out of range; on every rank,
    UnsupportedError where another rank has changed a parameter that the modifier_rank has not, and RanksError
    where the `with` failed on another rank.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    several = [params] if isinstance(params, nn.Parameter) else list(params)
    owned: dict[Engine, list[nn.Parameter]] = {}
    for parameter in several:
        engine = engine_of(parameter)
        if enabled and engine is not None:
            owned.setdefault(engine, []).append(parameter)
    with contextlib.ExitStack() as stack:
        for engine, ours in owned.items():
            stack.enter_context(gathered(ours, write=modifier_rank is not None))
            if modifier_rank is not None:
                stack.enter_context(_changed_by(modifier_rank, engine, ours))
        yield


@contextlib.contextmanager
def _changed_by(modifier: int, engine: Engine, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Copy the values that the modifier leaves in the parameters to every rank."""
    ranks, what = engine.ranks, f"GatheredParameters(modifier_rank={modifier})"
    if not 0 <= modifier < ranks.size:
        raise ValueError(f"{what}: there are {ranks.size} ranks, numbered from 0")
    if ranks.size == 1:
        yield
        return
    before = [_content(one) for one in parameters]
    with ranks.together(what):
        yield
    forms = repr([(one.shape, one.dtype) for one in parameters]).encode()
    if not ranks.same(xxhash.xxh3_64_intdigest(forms) >> 1, what):
        raise UnsupportedError(
            f"{what}: inside it a parameter got another shape or type on some ranks; nothing is written"
        )
    changed = bytes(_content(one) != digest for one, digest in zip(parameters, before, strict=True))
    for parameter, by in zip(parameters, zip(*ranks.each(changed, what), strict=True), strict=True):
        if any(by) and not by[modifier]:
            raise UnsupportedError(
                f"{engine.parameters.name_of(parameter)} was changed inside {what} by rank "
                f"{', '.join(str(rank) for rank, did in enumerate(by) if did)}, and not by rank {modifier}, "
                "whose values are kept: nothing is written. Name the rank that changes it as modifier_rank, "
                "or change it on every rank."
            )
        if by[modifier]:
            # A copy: a thread of gloo's may have it for some milliseconds behind the `with`.
            values = parameter.detach().clone(memory_format=torch.contiguous_format)
            ranks.spread(values, modifier, what)
            with torch.no_grad():
                parameter.copy_(values)


def _content(parameter: nn.Parameter) -> int:
    return int(xxhash.xxh3_64_intdigest(as_bytes(parameter.detach().to("cpu").contiguous())))


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter of another module is fetched when it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing; see register_external_parameter."""


def __getattr__(name: str) -> Any:
    """Raise an error that names the replacement."""
    raise AttributeError(missing("zero", name))


__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]
