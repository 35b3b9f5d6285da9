"""Loss curves, compared and drawn. Trusted: training itself and matplotlib. Faked: the curves drawn."""

import json
from dataclasses import asdict, replace

import pytest

from infinity.bench.engine import losses
from infinity.bench.engine.losses import CurveSettings, last, smooth
from infinity.bench.engine.runs import STATE_DTYPES
from infinity.cli.text import Text, default_text

TINY = CurveSettings(
    preset="1m",
    steps=5,
    batch=1,
    sequence=16,
    lr=1e-3,
    warmup=1,
    weight_decay=0.1,
    seed=5,
    host_memory="16MiB",
)


def test_a_smoothed_value_is_the_mean_of_as_many_as_there_are():
    assert smooth([4.0, 2.0, 0.0, 7.0], width=2) == [4.0, 3.0, 1.0, 3.5]
    assert smooth([]) == []


def test_the_ends_of_curves_are_held_against_exact_state_s():
    curves = {"fp32": [9.0, *[2.0] * losses.SMOOTHED], "int8": [9.0, *[2.5] * losses.SMOOTHED]}
    assert last(curves) == {
        "fp32": {"loss": 2.0, "above_exact": 0.0},
        "int8": {"loss": 2.5, "above_exact": 0.5},
    }


def test_without_exact_state_there_is_nothing_to_be_above():
    assert last({"int8": [3.0]}) == {"int8": {"loss": 3.0}}


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "losses.png"
    losses.plot(path, {"three curves": {"fp32": [3.0, 2.0], "bf16": [3.0, 2.1], "int8": [3.0, 2.2]}})
    assert path.read_bytes().startswith(b"\x89PNG")


def recorded(path, optimizer, curves):
    path.write_text(json.dumps({"recipe": asdict(replace(TINY, optimizer=optimizer)), "losses": curves}))
    return str(path)


def test_what_was_measured_is_drawn_in_one_picture_a_panel_for_each_optimizer(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(losses, "_draw", lambda axes, title, curves: drawn.append((title, curves)))
    files = [
        recorded(tmp_path / f"{one}.json", one, {"fp32": [3.0], "int4": [number]})
        for number, one in enumerate(("AdamW", "Lion", "Muon"))
    ]
    picture = tmp_path / "all.png"
    losses.main(["--draw", *files, "--png", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [title.split(",")[0] for title, _ in drawn] == ["AdamW", "Lion", "Muon"]
    assert [curves["int4"] for _, curves in drawn] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "has no loss curves"),
        ("[]", "has no loss curves"),
        ('{"recipe": {"preset": "1m"}, "losses": {}}', "has no loss curves"),
    ],
)
def test_a_file_without_curves_is_named_and_nothing_drawn(tmp_path, capsys, content, told):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "other.json", tmp_path / "all.png"
    file.write_text(content)
    with pytest.raises(SystemExit):
        losses.main(["--draw", str(file), "--png", str(picture)])
    assert f"{file} {told}" in capsys.readouterr().err
    assert not picture.exists()


def test_curves_of_one_kind_are_drawn_once_and_of_known_types(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    one, again = (recorded(tmp_path / name, "SGD", {"fp32": [3.0]}) for name in ("one.json", "again.json"))
    odd = recorded(tmp_path / "odd.json", "SGD", {"fp8": [3.0]})
    for files, told in (([one, again], "Leave one of the two out"), ([odd], "curves of fp8")):
        with pytest.raises(SystemExit):
            losses.main(["--draw", *files, "--png", str(tmp_path / "all.png")])
        assert told in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_anything_is_trained(monkeypatch, capsys):
    monkeypatch.setattr(losses.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        losses.main(["--nvme", "nowhere", "--png", "losses.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.disk
def test_small_moments_train_a_small_llama_as_far_as_exact_ones(folder):
    """300 steps of 0.9 M parameters; the means of the last 20 losses, which are near 2.7."""
    pytest.importorskip("transformers")
    settings = replace(
        TINY, steps=300, batch=4, sequence=64, lr=6e-4, warmup=20, seed=0, host_memory="256MiB"
    )
    text = default_text()
    ends = last({name: list(losses.losses(settings, name, text, folder)) for name in STATE_DTYPES})
    exact = ends["fp32"]["loss"]
    assert exact < 3.2
    for name, end in ends.items():
        assert end["loss"] < 1.02 * exact, name


@pytest.mark.disk
@pytest.mark.parametrize("optimizer", [one for one in losses.OPTIMIZERS if one != "AdamW"])
def test_each_optimizer_has_curves_of_its_own(folder, tmp_path, optimizer):
    pytest.importorskip("transformers")
    source = tmp_path / "text.txt"
    source.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    settings = [replace(TINY, steps=2, optimizer=one) for one in (optimizer, "AdamW")]
    own, adamw = (list(losses.losses(one, "int4", Text(str(source)), folder)) for one in settings)
    assert own[0] == adamw[0]
    assert own[1] != adamw[1]


@pytest.mark.disk
def test_all_curves_start_from_the_same_weights_and_text(folder, tmp_path):
    pytest.importorskip("transformers")
    source = tmp_path / "text.txt"
    source.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    curves = [list(losses.losses(TINY, name, Text(str(source)), folder)) for name in ("fp32", "bf16", "fp32")]
    assert [len(curve) for curve in curves] == [5, 5, 5]
    assert curves[0] == curves[2]
    assert curves[0][0] == curves[1][0]
    assert curves[0][-1] != curves[1][-1]  # rounded moments have moved the weights differently
