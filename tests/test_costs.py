"""Costs of compiled steps that must not creep up, counted in CPU executables."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_costs, collectives_in, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dion2_jax import ScaleByDion2State, describe, dion2, scale_by_dion2, shardings_of

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from hlo_cost import count  # noqa: E402


def test_a_lone_matrix_is_shared_by_a_team():
    """[512, 8192] over 8: 1/8 of padding's all-to-all bytes, 1/3.5 of all bytes."""
    mesh = make_mesh((8,), "auto")
    whole, rows = (NamedSharding(mesh, P(*spec)) for spec in ((), ("a",)))
    params = {"w": jax.ShapeDtypeStruct((2048, 8192), jnp.float32, sharding=rows)}
    zero = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    tx = scale_by_dion2(ns_dtype=jnp.float32, param_shardings=rows)
    state = ScaleByDion2State(zero, params)
    text = jax.jit(tx.update).lower(params, state).compile().as_text()
    total = describe(params, ns_dtype=jnp.float32).total
    _, size = collectives_in(text)
    assert_costs(size, total)
    padded = 2 * 8 * (512 // 8) * 8192 * 4
    assert size["all-to-all"] == padded / 8
    assert sum(size.values()) <= padded / 3.5
    # Beside the products that the plan counts, a few operations an element.
    assert total.operations <= count(text).flops <= 1.1 * total.operations


LAYERS = 4
KERNELS = {**dict.fromkeys("qkvo", (256, 256)), "up": (256, 1024), "down": (1024, 256)}
# Of one device and step, jax 0.10.2: operations (float32 products six fold), result
# bytes of collectives, bytes of temporary memory.
RECORDED = {
    "sharded": (3_150_901_088, 1_130_508, 1_791_104),
    "shorter": (1_024_176_372, 806_912, 2_642_880),
}


@pytest.mark.skipif(
    not jax.__version__.startswith("0.10."), reason="recorded with jax 0.10"
)
@pytest.mark.parametrize("select_axis", RECORDED)
def test_a_small_model_costs_what_it_did(select_axis):
    rows = NamedSharding(make_mesh((8,), "auto"), P("a"))
    params = {
        f"{layer}/{name}": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
        for layer in range(LAYERS)
        for name, shape in KERNELS.items()
    }
    tx = dion2(
        0.1,
        ns_dtype=jnp.float32,
        select_axis=select_axis,
        param_shardings=shardings_of(params),
    )

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    shapes = jax.eval_shape(tx.init, params)
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            *(x.shape, x.dtype),
            sharding=rows if x.ndim else NamedSharding(rows.mesh, P()),
        ),
        shapes,
    )
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params)
    compiled = compiled.compile()
    text = compiled.as_text()
    found = (
        count(text).flops,
        sum(collectives_in(text)[1].values()),
        compiled.memory_analysis().temp_size_in_bytes,
    )
    assert found == pytest.approx(RECORDED[select_axis], rel=0.1)
