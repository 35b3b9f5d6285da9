"""Plans as text, as `str(plan)` writes them."""

from infinity.planning.plan import Plan, PlanStep
from infinity.planning.trace import Phase, Use


def parse_plan(text):
    """Read what `str(plan)` wrote."""
    opening, *steps = text.strip().splitlines()
    opening, _, lodged = opening.partition(" device ")
    assert opening.split()[0] == "open"
    return Plan(fetches(opening), tuple(map(step, steps)), tuple(map(int, lodged.split())))


def fetches(line):
    words = line.split()
    at = words.index("fetch") + 1 if "fetch" in words else len(words)
    return tuple(int(word) for word in words[at:] if word != "keep")


def step(line):
    words = line.split()
    return PlanStep(Use(Phase(line[0]), int(words[0][1:])), fetches(line), words[-1] == "keep")
