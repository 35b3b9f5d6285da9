"""The picture of a run: what is drawn of a made-up timeline. matplotlib is trusted; its figure is read."""

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.cli import picture
from infinity.cli.picture import BARS_SHOWN, Story, figure, page, save, thin
from infinity.timeline import Timeline

pytest.importorskip("matplotlib")
MIB = 1 << 20


def recorded(steps: int = 5) -> Timeline:
    """Steps of 10 s: computing, with a stall of 2 s for a read that takes 4 s."""
    timeline = Timeline()
    timeline.recording = True
    for step in range(steps):
        began = 10.0 * step
        timeline.mark_step(began)
        timeline.sample("memory", began, {"device": 10 * MIB, "host": 50 * MIB, "nvme": 3000 * MIB})
        timeline.sample("host", began, {"slots": 20 * MIB, "ahead": 0, "pinned": 30 * MIB})
        timeline.sample("host", began + 5, {"slots": 20 * MIB, "ahead": 10 * MIB, "pinned": 30 * MIB})
        timeline.span("compute", "forward", began, began + 10)
        timeline.span("stall", "read", began + 2, began + 4)
        timeline.span("read", "layer", began, began + 4, 4 * MIB)
        timeline.span("read", "layer", began + 2, began + 3, 4 * MIB)
    timeline.mark_step(10.0 * steps)
    return timeline


def moved(steps: int = 5) -> list[dict[tuple[str, str], int]]:
    return [{("read", "hi"): 2 * 10**9, ("read", "m"): 10**9, ("written", "m"): 10**9}] * steps


def texts(axes) -> str:
    legend = axes.get_legend()
    labels = [text.get_text() for text in legend.get_texts()] if legend else []
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    return "\n".join([*(text.get_text() for text in axes.texts), *labels, *ticks])


def drawn(story: Story):
    """The four axes: lanes, host memory in their steps, memory of the whole run, bytes."""
    return figure(story).axes


def test_lanes_tell_their_share_of_the_last_steps():
    lanes, *_ = drawn(Story("run", recorded()))
    said = texts(lanes)
    assert "compute\n80%" in said, "what waits within a phase does not compute"
    assert "stall\n20%" in said
    assert "read\n40%" in said
    assert "waits for read" in said
    assert "at most 8.0 MiB in flight" in said
    assert [text for text in said.splitlines() if text.startswith("step ")] == ["step 3", "step 4", "step 5"]
    assert lanes.get_xlim() == (0, 30)


def test_memory_shows_the_tiers_and_the_budget_and_says_what_is_too_large_to_draw():
    _, _, memory, _ = drawn(Story("run", recorded(), budget_nbytes=64 * MIB))
    said = texts(memory)
    assert "host: 50.0 MiB at most" in said
    assert "host_memory: 64.0 MiB" in said
    assert "nvme: 2.9 GiB now, not drawn" in said
    assert memory.get_ylim()[1] < 200


def test_phases_have_a_band_of_their_own_above_the_uses_of_units():
    timeline = recorded()
    timeline.span("compute", "layer", 41, 43)
    lanes, *_ = drawn(Story("run", timeline))
    ticks = [label.get_text() for label in lanes.get_yticklabels()]
    assert ticks == ["phase", "compute\n80%", "stall\n20%", "read\n40%"]
    written = {text.get_text(): text.get_position()[1] for text in lanes.texts}
    assert (written["forward"], written["layer"]) == (pytest.approx(0), pytest.approx(-1))


def test_host_memory_is_stacked_by_what_holds_it_in_the_steps_whose_lanes_are_drawn():
    _, host, *_ = drawn(Story("run", recorded(), budget_nbytes=64 * MIB))
    said = texts(host)
    assert "slots: 20.0 MiB" in said
    assert "ahead: 10.0 MiB" in said
    assert "gradients" not in said, "what held nothing has no place in the legend"
    assert "host_memory: 64.0 MiB" in said
    assert host.get_xlim() == (0, 30)
    tops = [path.vertices for one in host.collections for path in one.get_paths()]
    assert max(vertices[:, 1].max() for vertices in tops) == 60, "30 pinned, 10 ahead, 20 of slots"
    first = [vertices[(vertices[:, 0] < 5), 1].max() for vertices in tops]
    assert max(first) == 50, "each sample holds until the next"


def test_the_same_cause_has_the_same_colour_in_every_picture():
    colors = []
    for longest in ("read", "slot"):
        timeline = recorded()
        timeline.span("stall", "slot", 41, 49 if longest == "slot" else 41.5)
        lanes, *_ = drawn(Story("run", timeline))
        legend = lanes.get_legend()
        labels = [text.get_text() for text in legend.get_texts()]
        assert labels[0] == ("waits for read" if longest == "read" else "waits for slot")
        patches = [patch.get_facecolor() for patch in legend.get_patches()]
        colors.append(dict(zip(labels, patches, strict=True)))
    assert colors[0] == colors[1]


def test_bytes_are_stacked_reads_up_and_writes_down():
    *_, bars = drawn(Story("run", recorded(), moved()))
    tops = [bar.get_y() + bar.get_height() for bar in bars.patches]
    assert (min(tops), max(tops)) == (-1, 3)
    assert {text.get_text() for text in bars.get_legend().get_texts()} == {"hi", "m"}


def test_of_a_long_run_the_last_bars_are_drawn():
    *_, bars = drawn(Story("run", recorded(), moved(BARS_SHOWN + 7)))
    middles = [bar.get_x() + bar.get_width() / 2 for bar in bars.patches]
    assert (min(middles), max(middles)) == (pytest.approx(8), pytest.approx(BARS_SHOWN + 7))


def test_what_was_not_recorded_is_said():
    lanes, host, memory, bars = drawn(Story("run", Timeline()))
    assert [text.get_text() for text in lanes.texts] == ["no spans were recorded"]
    assert [text.get_text() for text in host.texts] == ["host memory was not sampled"]
    assert [text.get_text() for text in memory.texts] == ["memory was not sampled"]
    assert [text.get_text() for text in bars.texts] == ["nothing was read from NVMe or written to it"]


def test_a_step_of_a_million_spans_is_drawn_with_as_many_marks_as_can_be_seen():
    timeline = recorded(1)
    for at in range(20_000):
        timeline.span("work", "update", at / 2000, (at + 1) / 2000)
    lanes, *_ = drawn(Story("run", timeline))
    assert sum(len(one.get_paths()) for one in lanes.collections) < 2500
    assert "work\n100%" in texts(lanes)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 100)), min_size=1, max_size=50))
def test_thinning_keeps_the_peak_and_the_end(points):
    points = sorted(points)
    thinned = thin(points, 0.0, 10.0)
    assert max(value for _, value in thinned) == max(value for _, value in points)
    assert thinned[-1] == points[-1]
    assert thinned == [point for point in thinned if point in points]


def test_of_many_points_in_one_column_the_highest_and_the_last_are_kept():
    crowded = [(0.0001, 2), (0.0002, 9), (0.0003, 4), (0.0004, 3), (5.0, 1)]
    assert thin(crowded, 0.0, 10.0) == [(0.0002, 9), (0.0004, 3), (5.0, 1)]


def test_thinning_leaves_a_few_points_per_column():
    points = [(at / 1e5, at % 97) for at in range(100_000)]
    assert len(thin(points, 0.0, 1.0)) <= 2 * 2001


class Page(HTMLParser):
    """Collects the tags, the addresses and the cells of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sources: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_holds_table_and_picture_and_needs_nothing_else(tmp_path):
    path = tmp_path / "run.html"
    summary = [("bound", "I/O-bound: <94%> & more")]
    save(Story("a <run>", recorded(), moved(), 64 * MIB, summary), path)
    shown = Page(path.read_text())
    assert {"table", "svg"} <= shown.tags
    assert "script" not in shown.tags
    assert all(source.startswith("#") for source in shown.sources)
    assert {"a <run>", "I/O-bound: <94%> & more"} <= set(shown.words)


def test_the_page_suits_dark_and_narrow_screens():
    shown = page(Story("run", Timeline()), "<svg></svg>")
    assert "color-scheme: light dark" in shown
    assert "background: white" in shown, "the picture is drawn for a light one"
    assert 'name="viewport"' in shown
    assert "overflow-x: auto" in shown


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_a_long_title_is_wrapped_and_told_once(tmp_path, monkeypatch, suffix):
    figures, real = [], picture.figure
    monkeypatch.setattr(picture, "figure", lambda story: figures.append(real(story)) or figures[-1])
    title = " ".join(["word"] * 60)
    save(Story(title, recorded()), tmp_path / f"run{suffix}")
    told = figures[0].get_suptitle()
    if suffix == ".html":
        assert told == ""
        assert (tmp_path / "run.html").read_text().count(f"<h1>{title}</h1>") == 1
    else:
        assert told.replace("\n", " ") == title
        assert max(map(len, told.splitlines())) <= 120


def test_the_page_is_html_alone():
    assert page(Story("run", Timeline()), "<?xml?><!DOCTYPE svg><svg></svg>").count("<!DOCTYPE") == 1


def test_a_png_is_written_and_never_overwritten(tmp_path):
    path = tmp_path / "run.png"
    save(Story("run", recorded(), moved()), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileExistsError):
        save(Story("run", recorded()), path)
