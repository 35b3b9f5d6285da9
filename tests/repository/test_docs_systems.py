"""docs/systems.md says what is: its tests exist, and what it calls refused is an error. Nothing is faked."""

import re

import pytest

import infinity
from infinity.config.deepspeed_keys import KEYS, SECTIONS, Verdict
from places import ROOT

PAGE = (ROOT / "docs/systems.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and "---" not in line
][1:]


def refuses(key):
    """Whether a key of DeepSpeed's JSON, or "optimizer.type: NAME", is an error."""
    path, _, value = key.partition(": ")
    if not value:
        return {**KEYS, **SECTIONS}[path].verdict is Verdict.UNSUPPORTED
    with pytest.raises(infinity.ConfigError, match=f'{path} = "{value}": not supported'):
        infinity.Config.from_deepspeed({"optimizer": {"type": value, "params": {"lr": 1e-3}}})
    return True


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_row_is_shown_by_a_test_that_exists_or_a_key_that_is_refused(row):
    _, here, _, shown = row
    names = re.findall(r"`([^`]+)`", shown)
    tests = [name for name in names if name.startswith("tests/")]
    keys = [name for name in names if name not in tests]
    assert [one for one in tests if not (ROOT / one).is_file()] == []
    assert [one for one in keys if not refuses(one)] == []
    kinds = (bool(tests), bool(keys))
    assert kinds in {"works": [(True, False)], "refused": [(False, True)]}.get(
        here, [(True, False), (False, True)]
    )
