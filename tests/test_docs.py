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
    page = (ROOT / "docs/comparison.md").read_text()
    there = "\n".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    named = re.findall(r"`(test_\w+?)(_\.\.\.)?`", page)
    assert len(named) > 10
    missing = [name for name, _ in named if not re.search(rf"def {name}\w*\(", there)]
    assert not missing
