"""`python -m infinity.bench.activations.choices` on a tiny model. What it measures is not judged."""

import json

import pytest

from infinity.bench.activations import choices


@pytest.mark.disk
def test_budgets_from_all_recomputed_to_all_kept_take_turns_with_equal_losses(folder, tmp_path, monkeypatch):
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    monkeypatch.setitem(choices.SHAPES, "1m", tiny)
    out = tmp_path / "choices.json"
    options = ["--nvme", str(folder), "--model", "1m", "--tokens", "32", "--budgets", "3"]
    choices.main([*options, "--rounds", "2", "--settling", "2", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    kept = [row["kept"] for row in rows]
    assert (kept[0], kept[1], kept[-1]) == (0, 3, 3)
    assert kept[2:] == sorted(kept[2:])
    assert all(len(row["all_seconds"]) == 2 for row in rows)
