"""The examples in docstrings do what they show."""

import doctest
import importlib
import pkgutil

import pytest

import dion2_jax

MODULES = [
    importlib.import_module(f"dion2_jax.{module.name}")
    for module in pkgutil.iter_modules(dion2_jax.__path__)
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_of(module):
    result = doctest.testmod(module)
    assert result.failed == 0


def test_what_has_examples():
    found = doctest.DocTestFinder(exclude_empty=True)
    names = {
        test.name.rpartition(".")[2]
        for module in MODULES
        for test in found.find(module)
        if test.examples
    }
    assert names == {"dion2", "dion3", "describe", "shardings_of", "stats"}
