"""`python3 dev.py lines`: run the tests, and say which lines of infinity/ they reach, beside what other runs
have reached. What is not an option here goes to `dev.py test`: --all, files, what pytest takes.

Each statement sets a byte of a file before it runs: that costs little, counts in every process and thread of
the tests, and what a process has reached is known however it ends. A line is where a statement begins;
docstrings, `...` and what is imported for types alone are none.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import marshal
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from packages import PACKAGE
from places import ROOT, SUPPORT

FOLDER = ROOT / "build/lines"


class Marks(ast.NodeTransformer):
    """Puts `__reached__[first + line] = 1` before each statement; `lines` are those that have one."""

    def __init__(self, first):
        self.first = first
        self.lines = set()

    def generic_visit(self, node):
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                setattr(node, name, [one for statement in block for one in self._marked(statement)])
        return node

    def visit_Module(self, node):
        """A module keeps the name that it has looked up: at an interpreter's end it outlives builtins."""
        node = self.generic_visit(node)
        (kept,) = ast.parse("from builtins import __reached__").body
        node.body.insert(len(list(itertools.takewhile(_comes_first, node.body))), kept)
        return node

    def visit_If(self, node):
        types_alone = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node if types_alone else self.generic_visit(node)

    def _marked(self, statement):
        if _comes_first(statement) or isinstance(statement, ast.Global | ast.Nonlocal):
            return [statement]
        self.lines.add(statement.lineno)
        (mark,) = ast.parse(f"__reached__[{self.first + statement.lineno}] = 1").body
        for node in ast.walk(mark):
            ast.copy_location(node, statement)
        return [mark, statement]


def _comes_first(statement):
    """Whether it is a docstring or `...`, or an import from __future__: no code."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


class Marked:
    """The files of a package, marked. lines: by file, with the byte of each; nbytes: of all of them."""

    def __init__(self, package):
        self.package, self.lines, self.nbytes, self._trees = Path(package), {}, 0, {}
        found = os.walk(package, followlinks=True)
        paths = (Path(folder, name) for folder, _, names in found for name in names if name.endswith(".py"))
        digest = hashlib.sha256()
        for path in sorted(paths):
            text = path.read_text()
            digest.update(f"{path.relative_to(package)}\n{text}".encode())
            marks = Marks(self.nbytes)
            self._trees[path] = marks.visit(ast.parse(text))
            self.lines[path] = {line: marks.first + line for line in sorted(marks.lines)}
            self.nbytes += text.count("\n") + 2
        self.digest = digest.hexdigest()[:12]

    def write(self, folder):
        """Put the marked code where the processes of a run look for it; those of another may read it."""
        for path, tree in self._trees.items():
            code = Path(f"{folder}/code{path}")
            code.parent.mkdir(parents=True, exist_ok=True)
            marked = marshal.dumps(compile(tree, str(path), "exec", dont_inherit=True))
            if not (code.exists() and code.read_bytes() == marked):
                code.write_bytes(marked)

    def environment(self, reached):
        """Return what a process needs in order to count in that file, which is made where it is not there."""
        if not reached.exists():
            reached.write_bytes(bytes(self.nbytes))
        paths = os.pathsep.join(filter(None, [str(SUPPORT / "marked"), os.environ.get("PYTHONPATH")]))
        return os.environ | {"PYTHONPATH": paths, "INFINITY_TEST_LINES": str(reached)}

    def reached(self, file):
        """Return the lines of each file of the package that a run has reached."""
        seen = file.read_bytes()
        return {path: {line for line, at in of.items() if seen[at]} for path, of in self.lines.items()}

    def part(self, path):
        """Return the package within the package that a file belongs to."""
        return "/".join(path.relative_to(self.package).parts[:-1][:1])


def spans(lines, of):
    """Write lines as spans of those that a file has: `3-7, 12`."""
    numbers = {line: number for number, line in enumerate(sorted(of))}
    groups = itertools.groupby(enumerate(sorted(lines)), key=lambda one: numbers[one[1]] - one[0])
    ends = [[line for _, line in group] for _, group in groups]
    return ", ".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in ends)


def table(marked, runs):
    """Return the rows of a table: of each package, its lines, and the share of them that each run reaches."""
    product = "all but bench"
    counts = {name: Counter() for name in ("lines", *runs)}
    for path, lines in marked.lines.items():
        part = marked.part(path)
        for name, counter in counts.items():
            count = len(lines if name == "lines" else runs[name][path])
            counter[part or "(top)"] += count
            counter[product] += count * (part != "bench")
    parts = [*sorted(set(counts["lines"]) - {product}), product]
    rows = [f"{'package':<16}{'lines':>8}" + "".join(f"{name:>16}" for name in runs)]
    for part in parts:
        total = counts["lines"][part]
        shares = (f"{counts[name][part]:>8,}{counts[name][part] / max(total, 1):>8.2%}" for name in runs)
        rows.append(f"{part:<16}{total:>8,}" + "".join(shares))
    return rows


def left_out(marked, reached, of):
    """Return a row for each file that has lines which are in `of` and not reached: most lines first."""
    rows = []
    for path, lines in of.items():
        if missing := set(lines) - reached[path]:
            name = path.relative_to(marked.package.parent)
            rows.append((-len(missing), f"{name}: {spans(missing, marked.lines[path])}"))
    return [row for _, row in sorted(rows)]


def report(marked, runs, into):
    """Say what runs have reached: their share of each package, and of what any of them has reached."""
    rows = table(marked, runs)
    everything = {path: set().union(*(run[path] for run in runs.values())) for path in marked.lines}
    product = {path: lines for path, lines in everything.items() if marked.part(path) != "bench"}
    most = sum(map(len, product.values()))
    for name, run in runs.items():
        count = sum(len(run[path]) for path in product)
        rows.append(
            f"{name}: {count:,} lines, {count / max(most, 1):.2%} of the {most:,} that any run reaches"
        )
    details = [
        line
        for name, run in runs.items()
        for line in ("", f"not by {name}:", *left_out(marked, run, everything))
    ]
    details += ["", "by no run:", *left_out(marked, everything, marked.lines)]
    into.write_text("\n".join([*rows, *details]) + "\n")
    print("\n".join([*rows, f"lines: {into}"]))


def main(arguments):
    """Run the tests, unless only the report is asked for."""
    parser = argparse.ArgumentParser(prog="dev.py lines", allow_abbrev=False, description=__doc__)
    parser.add_argument("--as", dest="name", help="the run's name (all with --all, else default)")
    parser.add_argument("--more", action="store_true", help="add to what the run of that name has reached")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options, rest = parser.parse_known_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    marked, code = Marked(PACKAGE), 0
    if not options.report:
        name = options.name or ("all" if "--all" in rest else "default")
        reached = FOLDER / f"{name}.{marked.digest}"
        if not options.more:
            reached.unlink(missing_ok=True)
        marked.write(FOLDER)
        command = [sys.executable, str(ROOT / "dev.py"), "test", *rest]
        code = subprocess.run(command, env=marked.environment(reached), check=False).returncode
    files = sorted(FOLDER.glob(f"*.{marked.digest}"))
    report(marked, {file.stem: marked.reached(file) for file in files}, FOLDER / "report.txt")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
