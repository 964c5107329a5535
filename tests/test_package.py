"""What importing costs and drags in, and that versions agree."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import dion2_jax

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json, sys, time
import jax, optax
before, start = set(sys.modules), time.process_time()
import dion2_jax
seconds = time.process_time() - start
new = {name.partition(".")[0] for name in set(sys.modules) - before}
others = sorted(new - set(sys.stdlib_module_names) - {"dion2_jax"})
print(json.dumps([seconds, others, sorted(name.partition(".")[0] for name in before)]))
"""


def test_import_is_quick_and_needs_jax_and_optax_alone():
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    seconds, others, before = json.loads(found.stdout)
    assert seconds < 0.2  # of CPU time; 0.07 was measured
    # Parts of jax and optax that were not loaded yet are no further requirement.
    assert set(others) <= {"jax", "optax"}
    assert not {"flax", "orbax", "matplotlib", "rich"} & {*others, *before}


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [
        dion2_jax.__version__
    ]
    assert "https://arxiv.org/abs/2512.16928" in citation


def test_the_readme_of_a_package_index_has_no_relative_links():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shown = (ROOT / "README.md").read_text()
    rules = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for rule in rules["substitutions"]:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    assert "docs/howto.md lists" in shown  # what a link said is still said
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert links and all(link.startswith("https://") for link in links)
