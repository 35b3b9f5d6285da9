"""A causal language model of transformers in a local folder: checked, built, adapted by LoRA."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infinity.cli.data import NEEDED
from infinity.cli.settings import TrainSettings
from infinity.errors import ConfigError

_READ_PACKED = ("fp8", "mxfp4", "bitsandbytes", "compressed-tensors")
"""Methods of quantised checkpoints whose weights are read packed; fp8 with block scales alone."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
ADAPTER = "adapter_config.json"
"""The file by which a folder of PEFT's adapters is known."""
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


class LanguageModel:
    """The model that `--model` names, and its tokenizer: read from local files, without any code from them.

    Raises: ConfigError naming the option, for a missing folder, configuration or tokenizer, a model that is
    no causal language model, one with quantized weights that this command cannot use, a tokenizer with more
    tokens than the model has, and sequences longer than the model's positions.
    """

    def __init__(self, settings: TrainSettings, *, frozen: bool) -> None:
        """Read configuration and tokenizer; no weights. frozen: whether the model's own weights stay as they
        are, so that packed ones can be used.
        """
        from transformers.utils import logging

        if not sys.stderr.isatty():
            logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
        path = Path(settings.model or "")
        self.folder = path.parent if path.is_file() else path
        self.name = self.folder.absolute().name
        self._settings = settings
        if not (self.folder / "config.json").is_file():
            what = "there is no such folder"
            if path.exists():
                what = "holds no config.json" if path.is_dir() else "is a file"
            cure = "Name a folder of a model of transformers."
            if (path / ADAPTER).is_file():
                what = "holds PEFT's adapters, and no model"
                cure = (
                    "Name the model that they were trained on; `infinity generate` takes them by --adapter."
                )
            raise ConfigError(f"--model {path}: {what}. {cure}")
        self.fresh = path.is_file() or not any(any(self.folder.glob(names)) for names in _WEIGHTS)
        """Whether weights are drawn, not loaded."""
        self._config = self._read_config()
        self._check_quantization(frozen=frozen)
        self.tokenizer = self._read_tokenizer()
        self._check()

    @property
    def positions(self) -> int | None:
        """The most tokens of a sequence; None where the configuration names no limit."""
        positions = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

    def build(self) -> Any:
        """Build the model, with its adapters: within Init where it is offloaded."""
        import torch
        from transformers import AutoModelForCausalLM

        if self.fresh:
            options = {"dtype": torch.float32, "trust_remote_code": False}
            make: Any = AutoModelForCausalLM.from_config
            model = make(self._config, **options)
        else:
            more = {"dtype": torch.float32} if self._settings.plain else {}
            model = AutoModelForCausalLM.from_pretrained(
                self.folder, config=self._config, local_files_only=True, trust_remote_code=False, **more
            )
        checkpointed = getattr(model, "supports_gradient_checkpointing", False)
        if self._settings.checkpointing and self._settings.activation_memory is None and not checkpointed:
            raise ConfigError(
                f"--model {self.folder}: {type(model).__name__} has no gradient checkpointing. "
                "Add --no-checkpointing."
            )
        return self._adapted(model) if self._settings.lora else model

    def _adapted(self, model: Any) -> Any:
        import peft
        from torch import nn

        asked = self._settings
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out")  # of GPT-2's Conv1D: PEFT sets it right
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # PEFT 0.21 says so
            try:
                return peft.get_peft_model(
                    model,
                    peft.LoraConfig(
                        task_type="CAUSAL_LM",
                        r=asked.lora,
                        lora_alpha=2 * asked.lora if asked.lora_alpha is None else asked.lora_alpha,
                        target_modules=list(asked.lora_targets) if asked.lora_targets else "all-linear",
                    ),
                )
            except ValueError as error:
                names = {
                    place.rpartition(".")[2]
                    for place, one in model.named_modules()
                    if isinstance(one, nn.Linear)
                }
                raise ConfigError(
                    f"--lora: {error} The linear layers of {self.folder} are {', '.join(sorted(names))}: "
                    "name some of them by --lora-targets, or leave it out for all but the head."
                ) from error

    def _read_config(self) -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

        with _named(f"--model {self.folder}"):
            config = AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(
                f"--model {self.folder}: {config.model_type} is no causal language model of transformers."
            )
        return config

    def _check_quantization(self, *, frozen: bool) -> None:
        """Refuse quantized weights, but for those that are read packed, where they stay as they are."""
        said = getattr(self._config, "quantization_config", None)
        if said is None:
            return
        method = said.get("quant_method")
        known = method in _READ_PACKED and (method != "fp8" or said.get("weight_block_size") is not None)
        where, cure = f"--model {self.folder}", "Name a folder of the model in bf16, fp16 or fp32."
        if not known or self.fresh:
            raise ConfigError(f"{where}: quantized weights ({method}) cannot be used by this command. {cure}")
        if not frozen:
            raise ConfigError(
                f"{where}: quantized weights ({method}) cannot be trained. Give --lora, which leaves them as "
                f"they are. Or: {cure}"
            )
        if importlib.util.find_spec("transformers.core_model_loading") is None:
            raise ConfigError(f"{where}: {method} weights need transformers 5, which names them. {cure}")
        if method != "bitsandbytes":
            said["dequantize"] = True  # what transformers does on a CPU, asked for on a GPU too

    def _read_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        asked = self._settings.tokenizer
        folder = self.folder if asked is None else Path(asked)
        where = f"--model {folder}" if asked is None else f"--tokenizer {folder}"
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            raise ConfigError(f"{where}: no tokenizer there. Name a folder with one by --tokenizer FOLDER.")
        with _named(where):
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def _check(self) -> None:
        """Compare the model's sizes with the tokenizer's and the sequences'."""
        text = self._config.get_text_config()
        positions, sequence = self.positions, self._settings.sequence
        if positions is not None and positions < sequence:
            raise ConfigError(
                f"--sequence {sequence}: the model has positions for {positions} tokens. "
                f"Give --sequence {positions}, or less."
            )
        if len(self.tokenizer) > text.vocab_size:
            raise ConfigError(
                f"--model {self.folder}: the tokenizer has {len(self.tokenizer):,} tokens, the model "
                f"{text.vocab_size:,}. They do not belong together: see --tokenizer."
            )
        if self._settings.lora and importlib.util.find_spec("peft") is None:
            raise ConfigError(f"--lora needs peft: {NEEDED}")


def adapted(model: Any, folder: str) -> Any:
    """Return a model with the adapters of a folder, which stay in memory: behind Init.

    Raises: ConfigError for those of another model, and without PEFT.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"--adapter needs peft: {NEEDED}")
    import peft

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # PEFT 0.21 asks by the old name
        try:
            return peft.PeftModel.from_pretrained(model, folder, is_trainable=False)
        except (ValueError, RuntimeError, KeyError, OSError, UserWarning) as error:
            first = str(error).partition("\n")[0]
            raise ConfigError(
                f"--adapter {folder}: does not fit the model ({first}). Name the model that it was trained "
                "on by --model."
            ) from error


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Raise what transformers' reading raises as a ConfigError that says where."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"{where}: not readable by transformers: {error}") from error
