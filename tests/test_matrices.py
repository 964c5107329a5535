"""The default rule: which leaves are matrices, by rank and by path."""

import jax
import jax.numpy as jnp
import pytest
from optax.contrib import MuonDimensionNumbers

from dion2_jax import matrix_dimension_numbers
from dion2_jax._matrices import VECTOR_TABLES

MATRIX, STACK = MuonDimensionNumbers(0, 1), MuonDimensionNumbers(-2, -1)


def rule(params):
    """Entries for a tree of shapes, or of (shape, dtype)."""

    def leaf(x):
        shape, dtype = x if x and isinstance(x[0], tuple) else (x, jnp.float32)
        return jax.ShapeDtypeStruct(shape, dtype)

    shapes = jax.tree.map(leaf, params, is_leaf=lambda x: isinstance(x, tuple))
    return matrix_dimension_numbers(shapes)


def test_rank_two_and_floating_is_a_matrix():
    params = {
        "dense": {"kernel": (8, 12), "bias": (12,)},
        "scale": (),
        "half": ((8, 12), jnp.bfloat16),
        "tokens": ((8, 12), jnp.int32),
    }
    assert rule(params) == {
        "dense": {"kernel": MATRIX, "bias": None},
        "scale": None,
        "half": MATRIX,
        "tokens": None,
    }


@pytest.mark.parametrize("name", ["wte", "lm_head", "Embed", "output_projection"])
def test_tables_of_vectors_are_not_matrices_wherever_the_name_stands(name):
    assert name.lower() in VECTOR_TABLES
    assert rule({name: {"kernel": (8, 12)}}) == {name: {"kernel": None}}
    assert rule({"a": {name: (8, 12)}}) == {"a": {name: None}}


@pytest.mark.parametrize("path", ["bias", "scale", "norm1/weight", "q_norm/gamma"])
def test_stacked_or_per_head_vectors_are_not_matrices(path):
    first, _, last = path.partition("/")
    for params in ({first: {last: (4, 8)}} if last else {first: (4, 8)},):
        assert jax.tree.leaves(rule(params)) == []
        assert jax.tree.leaves(rule({"layers": params})) == []
    assert rule({"bias": {"value": (4, 8)}}) == {"bias": {"value": None}}


def test_part_of_a_name_is_not_the_name():
    assert rule({"header": (8, 12), "embedding_proj": (8, 12)}) == {
        "header": MATRIX,
        "embedding_proj": MATRIX,
    }


def test_a_bias_proves_a_stack_of_kernels():
    stacked = {"kernel": (3, 8, 12), "bias": (3, 12)}
    assert rule({"layers": stacked}) == {"layers": {"kernel": STACK, "bias": None}}
    deep = {"kernel": (2, 3, 8, 12), "bias": (2, 3, 12)}
    assert rule(deep)["kernel"] == STACK


def test_a_bias_of_an_nnx_state_is_found_one_level_down():
    params = {"kernel": {"value": (3, 8, 12)}, "bias": {"value": (3, 12)}}
    assert rule(params)["kernel"] == {"value": STACK}


UNKNOWN = {
    "no bias": {"kernel": (3, 8, 12)},
    "attention: one bias for [heads, size]": {"kernel": (8, 3, 12), "bias": (3, 12)},
    "L equals m": {"kernel": (8, 8, 12), "bias": (8, 12)},
    "convolution": {"kernel": (3, 3, 8, 12), "bias": (12,)},
    "not a kernel": {"w": (3, 8, 12), "bias": (3, 12)},
}


@pytest.mark.parametrize("params", UNKNOWN.values(), ids=UNKNOWN)
def test_what_shapes_do_not_tell_goes_to_adamw(params):
    found = rule(params)
    assert found.get("kernel", found.get("w")) is None
