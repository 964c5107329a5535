"""The pages say what there is: links, public names, and the tests they refer to."""

import re
from pathlib import Path

import pytest

import dion2_jax

ROOT = Path(__file__).parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    relative = [link for link in links if "://" not in link]
    missing = [link for link in relative if not (page.parent / link).exists()]
    assert not missing


def test_every_public_name_is_on_the_api_page():
    page = (ROOT / "docs/api.md").read_text()
    directives = re.findall(r"^\.\. [\w:]+:: dion2_jax\.(\w+)$", page, re.MULTILINE)
    assert sorted(directives) == sorted(dion2_jax.__all__)


def test_the_comparison_names_tests_that_exist():
    """In the file that is linked in the same cell, if any is."""
    named = 0
    for cell in (ROOT / "docs/comparison.md").read_text().split("|"):
        links = re.findall(r"\]\(\.\./(tests/test_\w+\.py)\)", cell)
        files = [ROOT / link for link in links] or ROOT.glob("tests/test_*.py")
        there = "\n".join(path.read_text() for path in files)
        for name, rest in re.findall(r"`(test_\w+?)(_\.\.\.)?`", cell):
            named += 1
            assert re.search("def " + name + ("_" if rest else r"\("), there), name
    assert named > 10
