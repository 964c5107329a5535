"""Bad, zero, huge and tiny gradients of one matrix, and what they do to the others.

However matrices are grouped, stacked or shared: what is asserted is equality of bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, place
from optax.contrib import MuonDimensionNumbers

from dion2_jax import describe, scale_by_dion2, shardings_of

# sizes of the mesh, leaves, shape, spec, arguments
LAYOUTS = {
    "one device": ((1,), 3, (8, 12), (), {}),
    "a group with a remainder": ((4,), 5, (16, 24), ("a",), {}),
    "a stack": ((8,), 2, (3, 16, 24), (None, "a"), {}),
    "experts": ((8,), 2, (8, 16, 24), ("a",), {}),
    "replicas that share": ((4, 2), 3, (16, 24), ("a",), {}),
    "teams": ((8,), 2, (256, 512), ("a",), {}),
    "across shards": ((4,), 3, (16, 24), ("a",), {"selection": "global"}),
    "both axes": ((4, 2), 3, (16, 24), ("a", "b"), {"score": "l2"}),
    "neurons": ((4,), 3, (16, 24), (None, "a"), {"neuron_beta2": 0.9}),
    "gram": ((4,), 2, (16, 24), (None, "a"), {"ns_method": "gram"}),
}
DTYPES = ("float32", "bfloat16")
CASES = [
    (name, dtype)
    for i, name in enumerate(LAYOUTS)
    for j, dtype in enumerate(DTYPES)
    if name in ("one device", "teams", "neurons") or i % 2 == j
]


@functools.cache
def made(name, dtype):
    """(numbers as {leaf: float32[...]}, step from them and eps to update and state)."""
    sizes, count, shape, spec, arguments = LAYOUTS[name]
    mesh, rng = make_mesh(sizes, "auto"), np.random.default_rng(0)
    raw = {f"w{i}": rng.normal(size=shape).astype(np.float32) for i in range(count)}
    lay = lambda tree: {k: place(x, mesh, spec, dtype) for k, x in tree.items()}  # noqa: E731
    shardings = shardings_of(lay(raw))

    @jax.jit
    def step(grads, eps):
        tx = scale_by_dion2(
            eps=eps,
            ns_dtype=dtype,
            param_shardings=shardings,
            weight_dimension_numbers=MuonDimensionNumbers(-2, -1),
            **arguments,
        )
        updates, state = tx.update(grads, tx.init(grads))
        return {"update": updates, "mu": state.mu, "nu": state.nu}

    def run(tree, eps=1e-8):
        found = step(lay(tree), jnp.float32(eps))
        return jax.tree.map(lambda x: np.asarray(x, np.float32), found)

    return raw, run


def one_matrix(raw):
    """A leaf, and the index of one of its matrices."""
    name = sorted(raw)[1]
    return name, (raw[name].shape[0] - 1,) if raw[name].ndim > 2 else ()


def with_matrix(raw, change):
    """The tree with that matrix changed."""
    name, index = one_matrix(raw)
    x = raw[name].copy()
    x[index] = change(x[index].copy())
    return raw | {name: x}


def parts(found, raw):
    """What belongs to that matrix: a list of arrays; all the rest as one tree."""
    name, index = one_matrix(raw)
    mine, rest = [], {}
    for kind, tree in found.items():
        if tree is None:
            continue
        x = tree[name].copy()
        mine.append(x[index].copy())
        x[index] = 0
        rest[kind] = tree | {name: x}
    return mine, rest


def set_entry(x, value):
    x[1, 2] = value
    return x


def test_the_layouts_are_what_they_are_called():
    words = {"teams": "teams of 4", "replicas that share": "shared by b"}
    for name, word in words.items():
        sizes, count, shape, spec, _ = LAYOUTS[name]
        x = place(np.ones(shape, np.float32), make_mesh(sizes, "auto"), spec)
        assert word in describe([x] * count).rows[0].exchange


@pytest.mark.parametrize("name, dtype", CASES)
def test_a_matrix_touches_itself_alone(name, dtype):
    raw, run = made(name, dtype)
    plain, others = parts(run(raw), raw)
    for value in (np.nan, np.inf, -np.inf):
        bad = run(with_matrix(raw, lambda x: set_entry(x, value)))  # noqa: B023
        mine, rest = parts(bad, raw)
        jax.tree.map(np.testing.assert_array_equal, rest, others)
        assert not np.isfinite(mine[0]).all() and not np.isfinite(mine[1]).all()
    mine, rest = parts(run(with_matrix(raw, np.zeros_like)), raw)
    jax.tree.map(np.testing.assert_array_equal, rest, others)
    assert not any(x.any() for x in mine)  # NaN would be true
    assert all(x.any() for x in plain)


@pytest.mark.parametrize("name, dtype", CASES)
def test_huge_and_tiny_gradients_have_the_update_of_ordinary_ones(name, dtype):
    raw, run = made(name, dtype)
    plain = run(raw, 0.0)
    for by in (2.0**100, 2.0**-100):  # 1.3e30 and 7.9e-31; every rounding is the same
        found = run({k: x * np.float32(by) for k, x in raw.items()}, 0.0)
        for kind in ("update", "nu"):
            jax.tree.map(np.testing.assert_array_equal, found[kind], plain[kind])
        for k, x in plain["mu"].items():
            np.testing.assert_array_equal(found["mu"][k], x * np.float32(by))
    for by in (1e30, 1e-30):  # with the default eps
        found = run({k: x * np.float32(by) for k, x in raw.items()})
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
