"""A file of prompts, read and tokenized: a line of text each, or JSON lines of prompt or messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.cli.data import DataError
from infinity.errors import ConfigError

_JSON = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    said: dict[str, Any]
    """As it stands in the file: {"prompt": ...} or {"messages": ...}."""
    ids: list[int]
    """Its tokens."""


def read_prompts(path: str, tokenizer: Any, new_tokens: int, positions: int | None) -> list[Prompt]:
    """Read all prompts of a file. new_tokens: of an answer. positions: of the model, None where it has no
    limit.

    Raises: ConfigError for a file that is not there; DataError naming the line that is no prompt, has
    messages without a chat template, or is too long for the model.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"--prompts {path}: there is no such file (looked in {Path.cwd()}). Name a text file, a prompt a "
            "line, or JSON lines (*.jsonl)."
        )
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # alone: JSON may hold U+2028
    except UnicodeDecodeError as error:
        raise DataError(f"--prompts {path}: not UTF-8: {error}") from error
    as_json = file.suffix in _JSON
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--prompts {path}, line {number}"
        said = _object(line, where) if as_json else {"prompt": line}
        ids = _tokens(said, tokenizer, where)
        if positions is not None and len(ids) + new_tokens > positions:
            raise DataError(
                f"{where}: {len(ids)} tokens and {new_tokens} new ones are more than the {positions} "
                "positions "
                "of the model. Give a smaller --max-new-tokens, or a shorter prompt."
            )
        prompts.append(Prompt(said, ids))
    if not prompts:
        raise DataError(f"--prompts {path}: the file holds no prompt.")
    return prompts


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if isinstance(said, dict):
        if isinstance(said.get("prompt"), str):
            return {"prompt": said["prompt"]}
        if isinstance(said.get("messages"), list):
            return {"messages": said["messages"]}
    raise DataError(f'{where}: expected an object with "prompt", a string, or "messages", a list of a chat.')


def _tokens(said: dict[str, Any], tokenizer: Any, where: str) -> list[int]:
    if "messages" in said:
        if not tokenizer.chat_template:
            raise DataError(
                f"{where}: messages need a chat template, and the tokenizer of {tokenizer.name_or_path} has "
                'none. Give an instruct model, or "prompt".'
            )
        try:
            ids = tokenizer.apply_chat_template(
                said["messages"], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        except Exception as error:  # the template's own, of any kind: it is code
            raise DataError(f"{where}: the chat template refuses it: {error}") from error
    else:
        ids = tokenizer(said["prompt"], verbose=False)["input_ids"]
    if not ids:
        raise DataError(f"{where}: no token in it.")
    return list(ids)
