"""Sequences of tokens from files of text, JSON lines or parquet, read and kept on disk by `datasets`.

[Note: packing]
The examples of a file, each closed by the tokenizer's end-of-text token, follow one another without padding
and are cut every `sequence` tokens, so that an example may begin in one sequence and end in the next. The end
of each file is padded with tokens that are not learned. The lines of a text file are one example.

[Note: learned tokens]
A label of IGNORED leaves a token out of the loss: the prompts of {"prompt", "completion"}, and in chats all
but the assistant's words where the chat template marks them ({% generation %}). Other templates do not say
which words are the assistant's; with them the whole chat is learned. Sequences without a learned token are
left out.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError, InfinityError

IGNORED = -100
"""The label of a token that is not learned, as transformers has it."""
NEEDED = "pip install 'zero-infinity[finetune]'"
_KINDS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}
_COLUMNS = ("messages", "prompt", "text")
"""What a row is, the first that there is."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LOOK_NBYTES = 4096

Example = tuple[list[int], list[int]]
"""Token ids, and as many labels."""
Batch = Mapping[str, list[Any]]


class DataError(InfinityError, ValueError):
    """A file of data is empty, damaged, or has other columns than expected."""


def packed(paths: Sequence[str], tokenizer: Any, sequence: int, flag: str) -> tuple[Any, str]:
    """Read, tokenize and pack files; return the rows and a line about them. Kept in datasets' own cache.

    A row has input_ids, labels, and learned, the number of tokens that a loss counts.

    paths: text, unless the name ends in .jsonl, .json, .ndjson or .parquet. sequence: tokens per row. flag:
    the option that named the files, for errors.

    Raises: ConfigError for a missing file, and without `datasets`; DataError naming the file.
    """
    for path in paths:
        _check(path, flag)
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"{flag} reads files by the package datasets: {NEEDED}")
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    rows = datasets.concatenate_datasets([_packed(path, tokenizer, sequence, flag) for path in paths])
    tokens, learned = len(rows) * sequence, sum(rows["learned"])
    line = f"{', '.join(paths)}: {len(rows):,} sequences of {sequence} tokens, {learned / tokens:.0%} learned"
    return rows, line


def _check(path: str, flag: str) -> None:
    """Refuse what is no file of data, before anything is read."""
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"{flag} {path}: that is a folder. Name its files, as {path}/*.jsonl")
    if not file.is_file():
        raise ConfigError(
            f"{flag} {path}: there is no such file (looked in {Path.cwd()}). Name a file of text, JSON lines "
            "(*.jsonl) or parquet (*.parquet)."
        )
    if file.stat().st_size == 0:
        raise DataError(f"{flag} {path}: the file is empty.")
    with file.open("rb") as opened:
        binary = b"\0" in opened.read(_LOOK_NBYTES)
    if binary and file.suffix not in _KINDS:
        raise DataError(
            f"{flag} {path}: that is no text. Expected text, JSON lines (*.jsonl) or parquet (*.parquet)."
        )


def _packed(path: str, tokenizer: Any, sequence: int, flag: str) -> Any:
    """Return a file's packed rows: input_ids, labels, and the number of learned tokens."""
    rows = _read(path, flag)
    encode = _encoding(rows, tokenizer, f"{flag} {path}")
    packing = Packing(encode, sequence, len(rows), _pad_of(tokenizer))
    try:
        packed_rows = rows.map(packing, batched=True, with_indices=True, remove_columns=rows.column_names)
    except (TypeError, ValueError, KeyError, _template_error()) as error:
        raise DataError(f"{flag} {path}: an example cannot be tokenized: {error}") from error
    if not len(packed_rows):
        raise DataError(f"{flag} {path}: no sequence of {sequence} tokens has one to learn.")
    return packed_rows


def _read(path: str, flag: str) -> Any:
    """Read a file as a Dataset, memory-mapped from datasets' cache."""
    import datasets

    kind = _KINDS.get(Path(path).suffix, "text")
    try:
        if kind == "text":
            return datasets.Dataset.from_text(path, keep_linebreaks=True)
        return getattr(datasets.Dataset, f"from_{kind}")(path)
    except (datasets.exceptions.DatasetsError, StopIteration, ValueError) as error:
        cause = error.__cause__ or error
        raise DataError(f"{flag} {path}: not readable as {kind}: {cause or 'it holds no row'}") from error


def _encoding(rows: Any, tokenizer: Any, where: str) -> Callable[[Batch, bool], Iterator[Example]]:
    """Return the function that tokenizes a batch of rows; its second argument says whether it is the last.

    Raises: DataError for unknown columns, for those of another type than expected, and for chats without a
    chat template.
    """
    columns = rows.column_names
    column = next((name for name in _COLUMNS if name in columns), None)
    if not len(rows):
        raise DataError(f"{where}: the file holds no row.")
    if column is None or (column == "prompt" and "completion" not in columns):
        raise DataError(
            f"{where}: the columns are {', '.join(columns)}. Expected messages, or prompt and completion, "
            "or text."
        )
    if column == "messages":
        if not tokenizer.chat_template:
            raise DataError(
                f"{where}: messages need a chat template, and the tokenizer of "
                f"{tokenizer.name_or_path} has none. Give an instruct model, or prompt and completion."
            )
        return _Chats(tokenizer)
    texts = ("prompt", "completion") if column == "prompt" else (column,)
    for name in texts:
        if getattr(rows.features[name], "dtype", None) not in {"string", "large_string"}:
            raise DataError(f"{where}: column {name} is {rows.features[name]}. Expected strings.")
    if _KINDS.get(Path(where).suffix) is None:
        return _Lines(tokenizer)
    return _Completions(tokenizer) if column == "prompt" else _Texts(tokenizer)


class _Encoding:
    """Tokenizes rows. A class, since datasets keeps results under a hash of function and tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def closed(self, ids: list[int]) -> list[int]:
        """Return token ids that end with the end-of-text token, where the tokenizer has one."""
        end = self.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]


class _Lines(_Encoding):
    """The lines of a text file: one example, tokenized a batch of lines at a time."""

    def __call__(self, batch: Batch, last: bool) -> Iterator[Example]:  # noqa: FBT001 - one protocol for all
        ids = self.tokenizer("".join(batch["text"]), add_special_tokens=False, verbose=False)["input_ids"]
        ids = self.closed(ids) if last else ids
        yield ids, ids


class _Texts(_Encoding):
    """{"text"}: one example per row."""

    def __call__(self, batch: Batch, last: bool) -> Iterator[Example]:  # noqa: FBT001 - one protocol for all
        for one in self.tokenizer(batch["text"], verbose=False)["input_ids"]:
            ids = self.closed(one)
            yield ids, ids


class _Completions(_Encoding):
    """{"prompt", "completion"}: the completion is learned."""

    def __call__(self, batch: Batch, last: bool) -> Iterator[Example]:  # noqa: FBT001 - one protocol for all
        end = self.tokenizer.eos_token_id
        prompts = self.tokenizer(batch["prompt"], verbose=False)["input_ids"]
        after = self.tokenizer(batch["completion"], add_special_tokens=False, verbose=False)
        completions = after["input_ids"]
        for prompt, completion in zip(prompts, completions, strict=True):
            before = prompt[:-1] if end is not None and prompt[-1:] == [end] else prompt
            learned = self.closed(completion)
            yield before + learned, [IGNORED] * len(before) + learned


class _Chats(_Encoding):
    """{"messages"}: chats by the tokenizer's template; see [Note: learned tokens]."""

    def __call__(self, batch: Batch, last: bool) -> Iterator[Example]:  # noqa: FBT001 - one protocol for all
        marks = bool(_GENERATION.search(self.tokenizer.get_chat_template()))
        for messages in batch["messages"]:
            said = self.tokenizer.apply_chat_template(
                [{name: value for name, value in one.items() if value is not None} for one in messages],
                return_dict=True,
                return_assistant_tokens_mask=marks,
            )
            ids = said["input_ids"]
            masks = said["assistant_masks"] if marks else [1] * len(ids)
            yield ids, [one if mask else IGNORED for one, mask in zip(ids, masks, strict=True)]


class Packing:
    """Cuts the examples of batches of rows into sequences; see [Note: packing]."""

    def __init__(
        self, encode: Callable[[Batch, bool], Iterator[Example]], sequence: int, rows: int, pad: int
    ) -> None:
        """sequence: tokens. rows: of the file, of which the last flushes. pad: the token that fills up."""
        self._encode, self._sequence, self._rows, self._pad = encode, sequence, rows, pad
        self._ids: list[int] = []
        self._labels: list[int] = []

    def __call__(self, batch: Batch, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Return the sequences that this batch of rows completes."""
        last = indices[-1] == self._rows - 1
        for ids, labels in self._encode(batch, last):
            self._ids += ids
            self._labels += labels
        if last:
            missing = -len(self._ids) % self._sequence
            self._ids += [self._pad] * missing
            self._labels += [IGNORED] * missing
        whole = len(self._ids) // self._sequence * self._sequence
        made: dict[str, list[Any]] = {"input_ids": [], "labels": [], "learned": []}
        for start in range(0, whole, self._sequence):
            labels = self._labels[start : start + self._sequence]
            # The first token of a sequence is predicted from nothing.
            if learned := sum(label != IGNORED for label in labels[1:]):
                made["input_ids"].append(self._ids[start : start + self._sequence])
                made["labels"].append(labels)
                made["learned"].append(learned)
        del self._ids[:whole], self._labels[:whole]
        return made


def _pad_of(tokenizer: Any) -> int:
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((one for one in known if one is not None), 0)


def _template_error() -> type[Exception]:
    """Return the error of chat templates, such as for roles in an order that the template refuses."""
    import jinja2

    return jinja2.TemplateError
