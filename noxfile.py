"""The tests on every supported end: `nox`, or `nox -s oldest -- -k arguments`.

An interpreter that is not found is left out. pyenv shows those that are named in
`PYENV_VERSION=3.11:3.12:3.13`.
"""

from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
PROJECT = nox.project.load_toml("pyproject.toml")["project"]
EXAMPLES = PROJECT["optional-dependencies"]["examples"]
SAMPLE = (
    "tests/test_layout.py",
    "tests/test_transform.py::test_sharded_equals_the_oracle",
)
IMPORT = """
import sys, time
import jax, optax
start = time.perf_counter()
import dion2_jax
seconds = time.perf_counter() - start
assert "site-packages" in dion2_jax.__file__, dion2_jax.__file__
assert not {"flax", "orbax", "rich"} & set(sys.modules)
print(f"import dion2_jax: {seconds:.3f} s beyond jax and optax")
assert seconds < 0.2
"""


@nox.session(python="3.11")
def oldest(session):
    """All tests, on the least that pyproject.toml asks for."""
    least = [*PROJECT["dependencies"], *EXAMPLES]
    session.install(".[test]", *(each.replace(">=", "==") for each in least))
    session.run("pytest", *(session.posargs or ["-n", "2"]))


@nox.session(python=["3.12", "3.13"])
def newest(session):
    """All tests, on the newest that pip finds."""
    session.install("--upgrade", ".[test]")
    session.run("pytest", *(session.posargs or ["-n", "2"]))


@nox.session(python="3.13", default=False)
def sample(session):
    """A few of those tests in a minute, with no more installed than they need."""
    needed = "hypothesis", "pytest", "pytest-timeout", "pytest-xdist"
    session.install("--upgrade", ".", *needed)
    session.run("pytest", "-n", "2", *session.posargs, *SAMPLE)


@nox.session(default=False)
def package(session):
    """Builds sdist and wheel, checks them, imports the wheel beside jax and optax."""
    session.install("build", "twine")
    dist = session.create_tmp()
    session.run("python", "-m", "build", "--outdir", dist)
    session.run("twine", "check", "--strict", *map(str, Path(dist).glob("*")))
    session.run("python", "-m", "venv", "--clear", f"{dist}/clean")
    python = f"{dist}/clean/bin/python"
    wheels = map(str, Path(dist).glob("*.whl"))
    session.run(python, "-m", "pip", "install", "-q", *wheels, external=True)
    session.run(python, "-I", "-c", IMPORT, external=True)  # -I: not from this folder
