"""A small sharded model for tests: two matrices and a bias on two devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dion2_jax

AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
SPECS = {"b": P(), "v": P("x", None), "w": P("x", None)}


def mesh_of(axes, count=2):
    return jax.make_mesh(
        (count,), ("x",), axis_types=(AXES[axes],), devices=jax.devices()[:count]
    )


def place(mesh, seed, dtype=jnp.float32):
    """{"b": [16], "v", "w": [8, 16]}, matrices sharded by rows."""
    rng = np.random.default_rng(seed)
    return {
        name: jax.device_put(
            jnp.asarray(rng.normal(size=(16,) if name == "b" else (8, 16)), dtype),
            NamedSharding(mesh, spec),
        )
        for name, spec in SPECS.items()
    }


def optimizer(params, learning_rate=0.1, **arguments):
    """dion2 in float32; the same object for the same shardings and arguments."""
    leaves, tree = jax.tree.flatten(dion2_jax.shardings_of(params))
    arguments = {"ns_dtype": jnp.float32, "learning_rate": learning_rate} | arguments
    return make_optimizer(tree, tuple(leaves), tuple(arguments.items()))


@functools.cache
def make_optimizer(tree, leaves, arguments):
    shardings = tree.unflatten(leaves)
    return dion2_jax.dion2(**dict(arguments), param_shardings=shardings)


@functools.cache
def jitted(function):
    return jax.jit(function)


def plain_steps(tx, params, grads):
    """Parameters and state after one update for each of `grads`."""
    state, start = tx.init(params), params
    for g in grads:
        updates, state = jitted(tx.update)(g, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for w in "vw":
        # Two orthonormal rows times 0.1 sqrt(2) a step; decay alone moves it by 0.01.
        assert jnp.linalg.norm(params[w] - start[w]) > 0.1
    return params, state


def assert_close(actual, wanted, atol=1e-5, zero=False):
    """Same structure, shapes, dtypes; values within `atol`, finite, not all zero.

    zero: they must all be zero, as a state is after init.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    leaves = [(np.asarray(x), np.asarray(y)) for x, y in both(actual, wanted)]
    assert any(y.any() for _, y in leaves) != zero
    for a, b in leaves:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = a.astype(np.float64), b.astype(np.float64)
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def both(actual, wanted):
    """Leaf by leaf."""
    return zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True)


def assert_sharded_alike(tree, params):
    for x, p in both(tree, params):
        assert x.sharding.is_equivalent_to(p.sharding, p.ndim), (x.sharding, p.sharding)
