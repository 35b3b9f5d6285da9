"""The site, as `python3 dev.py docs` makes it. Trusted: mkdocs; skipped where it is not installed."""

import html
import os
import re
import subprocess
import sys

import pytest

import infinity
from places import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder


def shown(path):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", path.read_text())))


def test_the_reference_has_every_public_name_with_its_settings_and_errors(site):
    page = (site / "api.html").read_text()
    assert [name for name in infinity.__all__ if f'id="infinity.{name}"' not in page] == []
    text = shown(site / "api.html")
    assert "host_memory ( int | str | None , default: None )" in text
    assert 'bytes, or text like "4GiB": a hard budget' in text
    assert "weight_decay ( float , default: 0.01 )" in text
    assert "Raises: ConfigError" in text


def test_the_readme_is_the_first_page_and_links_out_of_docs_lead_to_pages_and_files(site):
    assert "Train PyTorch models that are larger than GPU and host memory" in shown(site / "index.html")
    for page in ("files/CHANGELOG.html", "files/tiling/index.html", "files/examples/plain_loop.py"):
        assert (site / page).is_file(), page
    assert 'href="files/examples/plain_loop.py"' in (site / "examples.html").read_text()
    assert 'src="files/bench/results/losses.png"' in (site / "benchmarks.html").read_text()


def test_no_page_asks_another_site_for_anything(site):
    asked = re.compile(r"""<(?:script|link|img)[^>]+(?:src|href)=["'](https?://[^"']+)""")
    assert {one for path in site.rglob("*.html") for one in asked.findall(path.read_text())} == set()
