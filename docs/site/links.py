"""For mkdocs: README.md is the first page, and links to files outside of docs/ work in the site.

A page that docs/ links to (tiling/README.md, CHANGELOG.md) becomes a page of the site, and any other file (an
example, a plot) is copied into it, both under `files/`.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
places: dict[str, str] = {"README.md": "index.md"}
"""Files of the repository, and where each is in the site."""


def targets(text: str, path: str) -> set[str]:
    """Return the files of the repository that the page at `path` links to."""
    found = {
        posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2])) for match in LINK.finditer(text)
    }
    return {one for one in found if (ROOT / one).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md and what pages link to outside of docs/."""
    places.update({f"docs/{file.src_uri}": file.src_uri for file in files})
    waiting = {"README.md"} | {path for path in places if path.endswith(".md")}
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        if path not in places:
            places[path] = f"files/{path}"
        if places[path].startswith("files/") or path == "README.md":
            files.append(File.generated(config, places[path], abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            waiting |= targets((ROOT / path).read_text(), path) - seen
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Point links at where their files are in the site."""
    here = next(path for path, place in places.items() if place == page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[2]))
        if path not in places:
            return match[0]
        place = posixpath.relpath(places[path], posixpath.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{place}{match[3] or ''}{match[4]}"

    return LINK.sub(moved, markdown)
