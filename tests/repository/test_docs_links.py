"""README.md and docs/ hold together: links lead somewhere, commands exist, the menu is whole."""

import importlib.util
import re
import shlex

import pytest

from infinity import __main__ as line
from infinity.cli import main as cli
from places import ROOT

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("[!.]*/README.md"),  # and none of a tool's cache
        ROOT / "bench/results/README.md",
    ]
)
DOCS = [path for path in PAGES if path.parent.name == "docs" or path == ROOT / "README.md"]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
README_NBYTES = 8 << 10
FILE_NBYTES = 1 << 20
PROGRAMS = {
    *("apt-get", "cat", "cd", "dpkg-deb", "pip", "python", "python3", "torchrun", "infinity"),
    ".venv/bin/python",
}
PROGRAMS |= {".venv/bin/infinity"}


def name(path):
    return str(path.relative_to(ROOT))


def prose(path):
    """The text of a page without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)


def anchors(path):
    """The anchors that GitHub and mkdocs give a page's headings."""
    found = []
    for title in re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE
    ):
        kept = re.sub(r"[^\w\- ]", "", title.replace("`", "").lower())
        found.append(kept.replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_link_leads_to_a_file_and_a_heading(path):
    wrong = []
    for target in LINK.findall(prose(path)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(target)
    assert wrong == []


def test_a_reader_needs_a_minute_for_the_readme():
    assert len((ROOT / "README.md").read_bytes()) <= README_NBYTES


def test_every_page_is_in_the_menu_and_the_menu_names_pages_that_are_there():
    menu = re.findall(r"^ +- .+: ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.name for path in ROOT.glob("docs/*.md")}
    here = {one.removeprefix("files/") for one in menu if one.startswith("files/")}
    assert {one for one in menu if not one.startswith("files/")} == pages | {"index.md"}  # index: README.md
    assert [one for one in here if not (ROOT / one).is_file()] == []
    assert len(menu) == len(set(menu))


def test_every_extra_is_explained():
    pyproject = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    extras = set(re.findall(r"^(\w+) = \[", pyproject.split("\n[")[0], re.MULTILINE))
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/start.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == extras


def test_no_file_of_the_docs_is_large():
    large = [path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert [name(path) for path in large if path.stat().st_size > FILE_NBYTES] == []


def commands():
    """Yield the command lines in the pages of docs/ and the README: blocks of sh, and `code` that is one."""
    for path in [*DOCS, ROOT / "CONTRIBUTING.md"]:
        text = path.read_text()
        for block in SHELL.findall(text):
            for written in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(written, comments=True):
                    yield path, words
        for code in re.findall(
            r"`((?:python3 dev\.py|infinity (?:train|plan|bench|doctor|export)) [^`]+)`", text
        ):
            yield path, shlex.split(code)


COMMANDS = [pytest.param(words, id=f"{name(path)}: {' '.join(words)}") for path, words in commands()]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_that_pages_name_exist(words, capsys):
    """Their programs, their files and folders of this repository, and the options of Infinity's own."""
    for word in " ".join(words).replace("&&", " ; ").split(" ; "):
        program, *rest = word.split()
        assert program in PROGRAMS, program
        for one in rest:
            if re.match(r"(tests|examples|bench)/[\w/.]+$", one) and "results" not in one:
                assert (ROOT / one).exists(), one
        if rest[:1] == ["dev.py"]:
            dev = (ROOT / "dev.py").read_text()
            assert re.search(rf"^def {rest[1]}\(", dev, re.MULTILINE), rest[1]
        if "-m" in rest and (module := rest[rest.index("-m") + 1]).startswith("infinity."):
            assert importlib.util.find_spec(module), module
        if program.rpartition("/")[2] == "infinity":
            understood(rest, capsys)


def understood(arguments, capsys):
    """The command's own parser reads them, with all options, and is not asked to do anything."""
    parser = cli._parser(line.BENCHES, line._plan, line._outline_of)
    try:
        parser.parse_args([one for one in arguments if one != "..."])
    except SystemExit:
        assert "the following arguments are required" in capsys.readouterr().err  # said of it in a sentence
