"""`infinity plan` as it is called, in this process."""

import argparse
import io
import json

from rich.console import Console

from infinity.bench.planning import plan

RATES = ["--nvme-read", "2", "--nvme-write", "1", "--nvme-mixed", "1.5", "--compute", "1"]


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args(plan.spelled_out([*map(str, arguments)]))


def ask(*arguments, width=300):
    """Run the command; return its exit code and all it shows."""
    text = io.StringIO()
    return plan.run(parsed(*arguments), Console(width=width, file=text)), text.getvalue()


def rows_of(folder, *arguments):
    """Run the command, and return the rows that it writes as JSON."""
    ask(*arguments, "--json", folder / "plan.json")
    return json.loads((folder / "plan.json").read_text())["rows"]
