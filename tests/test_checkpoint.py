"""Parameters and state saved and restored by Orbax: shardings, bits, next step."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from small import assert_sharded_alike, jitted, mesh_of, optimizer, place


@pytest.mark.parametrize("axes", ["auto", "explicit"])
def test_restored_state_has_the_same_bits_shardings_and_next_step(tmp_path, axes):
    mesh = mesh_of(axes)
    with jax.set_mesh(mesh):
        params, grads = place(mesh, 0), place(mesh, 1)
        tx = optimizer(params)
        update = jitted(tx.update)
        _, state = update(grads, jax.jit(tx.init)(params), params)
        saved = {"params": params, "state": state}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "step", saved)
            checkpointer.wait_until_finished()
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, saved)
            restored = checkpointer.restore(tmp_path / "step", shapes)
        assert_same_bits(restored, saved)
        assert_sharded_alike(restored, saved)
        wanted = update(grads, state, params)
        found = update(grads, restored["state"], restored["params"])
        assert_same_bits(found, wanted)
        assert_sharded_alike(found, wanted)


def assert_same_bits(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
