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
    state = tx.init(params)
    for g in grads:
        updates, state = jitted(tx.update)(g, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


def assert_close(actual, wanted, atol=1e-5):
    """Same structure, shapes, dtypes; values within `atol`."""
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=atol
        )


def assert_sharded_alike(tree, params):
    for x, p in zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True):
        assert x.sharding.is_equivalent_to(p.sharding, p.ndim), (x.sharding, p.sharding)
