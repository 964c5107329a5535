"""What a step sends, counted in compiled text and compared with `describe`.

float32 throughout: CPU executables widen bfloat16 collectives, which doubles bytes.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import KINDS, assert_costs, collectives_in, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import dion2_jax
from dion2_jax import scale_by_dion2, shardings_of


def placed(mesh, spec, count, shape):
    sharding = NamedSharding(mesh, P(*spec))
    return {f"w{i}": jax.device_put(jnp.zeros(shape), sharding) for i in range(count)}


def collectives(mesh, spec, count, shape, kind="auto", **arguments):
    """Number and result bytes of every kind of collective of one update."""
    params = placed(mesh, spec, count, shape)
    given = shardings_of(params) if kind == "auto" else None
    tx = scale_by_dion2(ns_dtype=jnp.float32, param_shardings=given, **arguments)
    text = jax.jit(tx.update).lower(params, tx.init(params)).compile().as_text()
    return collectives_in(text)


# sizes of the mesh, spec, matrices, shape -> collectives besides two all-to-alls
LAYOUTS = {
    "rows": ((8,), ("a",), 8, (32, 24), {}),
    "columns": ((8,), (None, "a"), 8, (32, 24), {}),
    "tuple": ((4, 2), (("a", "b"),), 8, (32, 24), {}),
    "both": ((4, 2), ("a", "b"), 8, (32, 24), {"all-reduce": 1}),
    "remainder": ((8,), ("a",), 11, (32, 24), {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_all_to_alls_a_group(name, kind):
    sizes, spec, count, shape, others = LAYOUTS[name]
    mesh = make_mesh(sizes, kind)
    number, size = collectives(mesh, spec, count, shape, kind)
    assert number == {"all-to-all": 2, **others}
    params = placed(mesh, spec, count, shape)
    total = dion2_jax.describe(params, ns_dtype=jnp.float32).total
    assert_costs(size, total)


def test_collectives_do_not_grow_with_layers_but_bytes_do():
    mesh = make_mesh((8,), "auto")
    few, small = collectives(mesh, ("a",), 8, (32, 24))
    many, large = collectives(mesh, ("a",), 24, (32, 24))
    assert few == many == {"all-to-all": 2}
    assert large["all-to-all"] == 3 * small["all-to-all"]


def test_case_03_bytes_are_in_proportion_to_the_fraction():
    mesh = make_mesh((8,), "auto")
    _, quarter = collectives(mesh, ("a",), 8, (32, 24), fraction=0.25)
    _, whole = collectives(mesh, ("a",), 8, (32, 24), fraction=1.0)
    assert whole["all-to-all"] == 4 * quarter["all-to-all"] > 0


@pytest.mark.parametrize("spec", [(), ("a",)])
def test_only_replicas_that_share_gather(spec):
    mesh = make_mesh((4, 2), "auto")
    shared, size = collectives(mesh, spec, 8, (32, 24))
    alone, _ = collectives(mesh, spec, 8, (32, 24), share_replicas=False)
    assert shared["all-gather"] == 1
    assert alone == ({"all-to-all": 2} if spec else {})
    params = placed(mesh, spec, 8, (32, 24))
    total = dion2_jax.describe(params, ns_dtype=jnp.float32).total
    assert_costs(size, total)


def test_batch_axes_need_no_collective():
    mesh = make_mesh((8,), "auto")
    found, _ = collectives(
        *(mesh, ("a",), 1, (8, 16, 24)),
        weight_dimension_numbers=MuonDimensionNumbers(1, 2),
    )
    assert found == {}


def test_case_20_rounds_bound_the_buffer_and_change_no_bit():
    mesh = make_mesh((8,), "auto")
    params = placed(mesh, ("a",), 24, (32, 24))
    keys = jax.random.split(jax.random.key(0), 24)
    grads = {
        w: jax.device_put(jax.random.normal(key, p.shape), p.sharding)
        for (w, p), key in zip(params.items(), keys, strict=True)
    }
    number, size = collectives(mesh, ("a",), 24, (32, 24), max_exchange_bytes=800)
    assert number["all-to-all"] == 6
    # Rounds are alike here; 24 matrices of one row a device in one would be 2304.
    assert size["all-to-all"] == 6 * 768
    results = []
    for most in (2**20, 800):
        tx = scale_by_dion2(
            param_shardings=shardings_of(params), max_exchange_bytes=most
        )
        updates, _ = jax.jit(tx.update)(grads, tx.init(params))
        results.append(jax.block_until_ready(updates))
    for w in params:
        assert (results[0][w] == results[1][w]).all() and results[0][w].any()
