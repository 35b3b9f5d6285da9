"""The figures of README.md and docs/benchmarks.md are those of the files in bench/results."""

import json
import re

import pytest

from places import ROOT

README, BENCHMARKS = ((ROOT / name).read_text() for name in ("README.md", "docs/benchmarks.md"))
NAMES = {
    "DeepSpeed NVMe": "DeepSpeed NVMe",
    'Infinity, 512 MiB, `update="backward"`': "Infinity, 512MiB, backward, fp32 state",
    'Infinity, 512 MiB, `update="forward"`, clipped': "Infinity, 512MiB, clipped, fp32 state",
    'Infinity, 512 MiB, `state_dtype="int8"`': "Infinity, 512MiB, backward, int8 state",
    "Infinity, DeepSpeed's memory": "Infinity, DeepSpeed's memory, backward, fp32 state",
    "PyTorch, everything in memory": "PyTorch",
    "forward and backward alone": "forward and backward alone",
}


def contestants(name):
    rows = json.loads((ROOT / "bench/results" / name).read_text())["rows"]
    return {row["contestant"]: row for row in rows}


def row(page, first):
    line = next(line for line in page.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def memory(nbytes):
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


XEON, EPYC = contestants("step-269m-16.json"), contestants("step-269m-16-epyc.json")
EIGHT = contestants("step-269m-8x8.json")


@pytest.mark.parametrize("first", NAMES)
def test_the_table_of_steps_is_that_of_the_runs(first):
    xeon, epyc = XEON[NAMES[first]], EPYC[NAMES[first]]
    moved, peak = f"{xeon['bytes_per_parameter']:.1f}", memory(xeon["peak_rss"])
    assert row(BENCHMARKS, first) == [f"{xeon['seconds']:.2f}", f"{epyc['seconds']:.2f}", moved, peak]


def test_the_readme_has_five_figures_of_these_runs():
    deepspeed, ours = XEON["DeepSpeed NVMe"], XEON[NAMES['Infinity, 512 MiB, `update="backward"`']]
    same = XEON[NAMES["Infinity, DeepSpeed's memory"]]
    seconds = f"{deepspeed['seconds']:.2f}"
    figures = {
        'seconds, `host_memory="512MiB"`': [f"{ours['seconds']:.2f}", seconds],
        "seconds, in the memory that DeepSpeed takes": [f"{same['seconds']:.2f}", seconds],
        "seconds, eight micro-batches of 8 tokens": [
            f"{EIGHT[name]['seconds']:.2f}" for name in (ours["contestant"], "DeepSpeed NVMe")
        ],
        "NVMe bytes moved per parameter": [f"{one['bytes_per_parameter']:.1f}" for one in (ours, deepspeed)],
        "peak memory of the process": [f"{one['peak_rss'] / 2**30:.1f} GiB" for one in (ours, deepspeed)],
    }
    table = re.search(r"## Beside DeepSpeed\n\n((?:\|.*\n)+)", README)[1].splitlines()
    assert {
        line.split(" | ")[0].strip("| "): row(README, line.split(" | ")[0].strip("| ")) for line in table[2:]
    } == (figures)
