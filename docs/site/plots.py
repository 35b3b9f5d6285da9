"""Draw docs/step.png anew: seconds of a training step by contestant, of two files in bench/results."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
FILES = {"Xeon": "step-269m-16.json", "EPYC": "step-269m-16-epyc.json"}


def contestants(file: str) -> dict[str, float]:
    """Return the seconds of each contestant's step, the medians of the rounds."""
    rows = json.loads((RESULTS / file).read_text())["rows"]
    return {row["contestant"]: row["seconds"] for row in rows if "beside updates" not in row["contestant"]}


def main() -> None:
    """Draw bars, the slowest above."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(FILES), figsize=(11, 3.6), layout="constrained")
    for place, (machine, file) in zip(axes, FILES.items(), strict=True):
        seconds = sorted(contestants(file).items(), key=lambda one: one[1])
        names = [name for name, _ in seconds]
        colors = ["#3949ab" if "Infinity" in name else "#9e9e9e" for name in names]
        bars = place.barh(names, [one for _, one in seconds], color=colors)
        place.bar_label(bars, fmt="%.2f", padding=3)
        place.set(title=machine, xlabel="seconds per step", xlim=(0, seconds[-1][1] * 1.15))
        place.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs/step.png", dpi=80)


if __name__ == "__main__":
    main()
