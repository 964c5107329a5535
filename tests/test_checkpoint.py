"""Parameters and state saved and restored by Orbax: shardings, bits, next step.

Other meshes: case 13 in test_cases.py. Whole runs: test_examples.py.
"""

import os
import pickle
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import two_processes
from helpers import dion2_state, with_dion2_state
from small import assert_close, assert_sharded_alike, jitted, mesh_of, optimizer, place

import dion2_jax

sys.path.insert(0, str(two_processes.ROOT / "examples"))

from lm.checkpoint import Checkpoints, damage  # noqa: E402
from lm.errors import UserError  # noqa: E402


def like(tree):
    """What Orbax restores into."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


def restore(folder, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, like(target))


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
        restored = restore(tmp_path / "step", saved)
        assert_same_bits(restored, saved)
        assert_sharded_alike(restored, saved)
        wanted = update(grads, state, params)
        found = update(grads, restored["state"], restored["params"])
        assert_same_bits(found, wanted)
        assert_sharded_alike(found, wanted)


@pytest.mark.parametrize("axes", ["auto", "explicit"])
def test_an_eager_init_is_restored_where_a_jitted_step_takes_it(tmp_path, axes):
    """Orbax binds what it restores to its devices, so counters must be on all."""
    mesh = mesh_of(axes)
    params, grads = place(mesh, 0), place(mesh, 1)
    tx = optimizer(params)
    state = tx.init(params)
    alone = dion2_jax.scale_by_dion2(param_shardings=params["w"].sharding)
    for counters in (state, alone.init({"w": params["w"]})):
        scalars = [x for x in jax.tree.leaves(counters) if not x.ndim]
        assert scalars and all(len(x.sharding.device_set) == 2 for x in scalars)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", state)
    restored = restore(tmp_path / "step", state)
    update = jitted(tx.update)
    wanted = update(grads, state, params)
    assert_same_bits(update(grads, restored, params), wanted)


def test_counters_stay_free_where_parameters_lie_apart():
    """Bound to one of two places, they could not meet the other's parameters."""
    mesh = mesh_of("auto")
    whole, one = jnp.ones((8, 16)), jax.device_put(jnp.ones((8, 16)), jax.devices()[1])
    split = place(mesh, 0)["w"]
    for params in ({"w": split, "v": one}, {"w": whole}, {"v": one}):
        tx = dion2_jax.dion2(0.1, param_shardings=dion2_jax.shardings_of(params))
        state = tx.init(params)
        scalars = [x for x in jax.tree.leaves(state) if not x.ndim]
        assert scalars and not any(x.committed for x in scalars)


def assert_same_bits(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))


# --- into an optimizer of other arguments ---------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{optimizer: (folder, state)} after a step, parameters, and other gradients."""
    mesh = mesh_of("auto")
    params, *grads = (place(mesh, seed) for seed in range(3))
    made = {}
    for name, beta2 in (("dion2", None), ("dion3", 0.95)):
        tx = optimizer(params, neuron_beta2=beta2)
        _, state = jitted(tx.update)(grads[0], init(tx, params), params)
        folder = tmp_path_factory.mktemp("saved") / name
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, state)
        made[name] = folder, state
    return made, params, grads[1]


def init(tx, params):
    """Counters on the mesh too: restored, they stay where they are."""
    with jax.set_mesh(params["w"].sharding.mesh):
        return jax.jit(tx.init)(params)


def selected(before, after, grads, axis=1):
    """How many rows (columns: axis 0) of "w" were: their momentum is decayed."""
    moved = np.asarray(dion2_state(before).mu["w"] + grads["w"])
    decayed = np.asarray(dion2_state(after).mu["w"]) != moved
    return int(decayed.any(axis=axis).sum())


# "w" is two shards of four rows.
@pytest.mark.parametrize(
    "changed, rows",
    [
        ({"fraction": 0.5}, 4),
        ({"fraction": 1.0}, 8),
        ({"selection": "global"}, 2),
        ({"ns_method": "gram"}, 2),
    ],
    ids=str,
)
def test_with_another_fraction_selection_or_method_it_trains_on(saved, changed, rows):
    made, params, grads = saved
    folder, state = made["dion2"]
    tx = optimizer(params, **changed)
    restored = restore(folder, init(tx, params))
    assert_same_bits(restored, state)
    updates, after = jitted(tx.update)(grads, restored, params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, after)))
    assert selected(restored, after, grads) == rows
    if "ns_method" in changed:  # another way to the same numbers
        old = optimizer(params, neuron_beta2=None)
        assert_close((updates, after), jitted(old.update)(grads, state, params), 1e-4)


def test_another_mu_dtype_converts_on_restore_or_is_refused(saved):
    made, params, grads = saved
    folder, state = made["dion2"]
    tx = optimizer(params, mu_dtype=jnp.bfloat16)
    restored = restore(folder, init(tx, params))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), dion2_state(state).mu)
    assert_same_bits(restored, with_dion2_state(state, mu=rounded))
    updates, after = jitted(tx.update)(grads, restored, params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
    assert dion2_state(after).mu["w"].dtype == jnp.bfloat16
    for made_with, read_with, of in (
        ("float32", "bfloat16", state),
        ("bfloat16", "None", restored),
    ):
        dtype = None if read_with == "None" else jnp.dtype(read_with)
        with pytest.raises(ValueError, match="'v'.*momentum is") as caught:
            optimizer(params, mu_dtype=dtype).update(grads, of, params)
        said = str(caught.value)
        assert f"is {made_with}" in said and f"mu_dtype={read_with}" in said


@pytest.mark.parametrize("before, after", [("dion2", "dion3"), ("dion3", "dion2")])
def test_with_or_without_neurons_is_refused_and_can_be_mended(saved, before, after):
    made, params, grads = saved
    folder, state = made[before]
    tx = optimizer(params, neuron_beta2=0.95 if after == "dion3" else None)
    start = init(tx, params)
    with pytest.raises(ValueError, match="nu"):  # Orbax: another structure
        restore(folder, start)
    with pytest.raises(ValueError, match=r"second moments \(nu\).*neuron_beta2"):
        tx.update(grads, state, params)
    mended = with_dion2_state(state, nu=dion2_state(start).nu)  # as the error says
    updates, moved = jitted(tx.update)(grads, mended, params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, moved)))
    neurons = after == "dion3"  # a quarter of 16 columns, or of 8 rows
    assert selected(mended, moved, grads, 0 if neurons else 1) == (4 if neurons else 2)


def test_the_example_names_what_does_not_fit(saved, tmp_path, monkeypatch):
    made, params, _ = saved
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"state": made["dion2"][1]})
    checkpoints.wait()
    for changed, words in (
        ({"neuron_beta2": 0.95}, "nu.v is only in this run"),
        ({"mu_dtype": jnp.bfloat16}, "mu.v is float32[8, 16], this run has bfloat16"),
    ):
        wanted = init(optimizer(params, **changed), params)
        with pytest.raises(UserError) as caught:
            checkpoints.restore(1, {"state": wanted})
        assert words in str(caught.value)
    # The same arguments: whole, and nothing is unpickled on the way.

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    wanted = init(optimizer(params, neuron_beta2=None), params)
    restored = checkpoints.restore(1, {"state": wanted})
    assert_same_bits(restored["state"], made["dion2"][1])
    assert damage(tmp_path, 1) is None
    checkpoints.close()


# --- by another number of processes ---------------------------------------------------


def test_one_process_to_two_and_back_keeps_every_bit(tmp_path):
    one, two = (Checkpoints(tmp_path / name, keep=1) for name in ("one", "two"))
    one.save(1, two_processes.tree(8, seed=1))
    one.wait()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, two_processes.__file__, str(tmp_path), port]
    running = [
        subprocess.Popen(
            [*command, str(process)], stderr=subprocess.PIPE, text=True, env=os.environ
        )
        for process in range(2)
    ]
    for process in running:
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
    assert damage(tmp_path / "two", 2) is None
    for count in (8, 4):
        found = two.restore(2, two_processes.tree(count, seed=0))
        two_processes.assert_same_bits(found, two_processes.tree(count, seed=2))
