"""The examples in docstrings do what they show."""

import doctest
import importlib
import inspect
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


def test_every_public_function_has_an_example():
    public = {name: getattr(dion2_jax, name) for name in dion2_jax.__all__}
    found = doctest.DocTestFinder(recurse=False)
    lacking = [
        name
        for name, value in public.items()
        if inspect.isfunction(value)
        and not any(test.examples for test in found.find(value))
    ]
    assert not lacking, f"{lacking} have no example: add one to their docstrings"
