"""`--config run.yaml`: a command's options from a file, by their names on the command line."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError


def config_of(arguments: Sequence[str]) -> str | None:
    """Return the file that `--config` names on a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        found: str | None = parser.parse_known_args(arguments)[0].config
    except argparse.ArgumentError:
        return None  # without its value: the command's own parser says so
    return found


def arguments_of(path: str, actions: Sequence[argparse.Action]) -> list[str]:
    """Return a YAML file's options as they would be typed. A list gives several values, `true` a flag alone.

    actions: of the parser. Words of a key are joined by "-" or "_".

    Raises: ConfigError for a file that cannot be read, an unknown key, with the nearest known one, and a
    value that is neither a number, a text, true, false nor a list of these.
    """
    flags = {flag[2:]: one for one in actions for flag in one.option_strings if flag.startswith("--")}
    known = [name for name in flags if name not in {"help", "config"} and not name.startswith("no-")]
    known += ["no-nvme"] if "no-nvme" in flags else []
    typed: list[str] = []
    for key, value in _read(path).items():
        name = str(key).replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise ConfigError(f"{path}: unknown option {key!r}. The nearest is {near[0]!r}.")
        typed += _typed(path, name, value, flags[name])
    return typed


def _read(path: str) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("--config needs PyYAML: pip install pyyaml") from error
    try:
        read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"--config {path}: there is no such file (looked in {Path.cwd()}). Name a YAML file, lines like "
            "`steps: 100`; `infinity train --help` lists the options."
        ) from None
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}. Name a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: expected lines like `steps: 100`, found {type(read).__name__}")
    return read


def _typed(path: str, name: str, value: Any, action: argparse.Action) -> Iterator[str]:
    """Yield the arguments for one option."""
    several = isinstance(value, list)
    values = value if several else [value]
    if any(not isinstance(one, (str, int, float)) or (several and isinstance(one, bool)) for one in values):
        raise ConfigError(f"{path}: {name}: {value!r}. Expected a number, a text, true, false or a list.")
    repeats = isinstance(action, argparse._AppendAction)  # noqa: SLF001 - argparse has no public name for it
    if isinstance(value, bool):
        if value:
            yield f"--{name}"
        elif isinstance(action, argparse.BooleanOptionalAction):
            yield f"--no-{name}"
    elif several and not repeats and action.nargs != "+":
        raise ConfigError(f"{path}: {name}: {value!r}. Expected one value.")
    elif repeats or not several:
        yield from (f"--{name}={one}" for one in values)
    else:
        yield from (f"--{name}", *map(str, values))
