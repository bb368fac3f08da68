"""The site builds without a warning and without the network, and its pages fetch nothing."""

import os
import re
import subprocess
import sys

import pytest

from experiments.pictures import PICTURES, draw_all
from tests.docs.blocks import ROOT

FETCHED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
IN_STYLE = re.compile(r"""(?:url\(|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(words, cwd=ROOT, env=os.environ | nowhere, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_there(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"contributing", "changelog"}
    assert pages <= {path.stem for path in site.glob("*.html")}
    assert "Where ordering does not help" in (site / "results.html").read_text()  # the whole, not the pointer to it


def test_the_reference_knows_what_users_call(site):
    text = (site / "reference.html").read_text()
    names = ["Sampler", "attach", "explain", "Handle.state_dict", "Handle.table"]
    names += ["herding.OrderingRule", "herding.SketchTable", "sketch.LayerRule"]
    assert [name for name in names if f'id="heeler.{name}"' not in text] == []


def test_pages_fetch_nothing(site):
    found = []
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        found += [
            (path.name, url) for url in (FETCHED if path.suffix == ".html" else IN_STYLE).findall(path.read_text())
        ]
    assert found == []


def test_pictures_are_drawn_by_the_code_and_used(tmp_path):
    drawn = draw_all(tmp_path)
    assert all(path.stat().st_size > 3000 for path in drawn)
    kept = {path.stem for path in (ROOT / "docs" / "images").glob("how-*.svg")}
    assert kept == set(PICTURES) == {path.stem for path in drawn}
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    assert all(f"images/{name}.svg" in text for name in PICTURES)
