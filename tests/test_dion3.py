"""dion3: dion2 with neurons normalized, under its own name."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import UPDATE, dion2_state, frobenius, make_mesh, needed_shardings, place

from dion2_jax import STATIC_ARGS, dion2, dion3

GRADS = [
    np.random.default_rng(i).normal(size=(32, 48)).astype(np.float32) for i in range(3)
]


def run(tx, place_one=jnp.asarray):
    params = {"w": place_one(np.ones((32, 48), np.float32))}
    state, update = tx.init(params), jax.jit(tx.update)
    for grad in GRADS:
        updates, state = update({"w": place_one(grad)}, state, params)
    return np.asarray(updates["w"]), np.asarray(dion2_state(state).nu["w"])


def test_signature_is_that_of_dion2_but_for_one_default():
    two, three = (inspect.signature(f).parameters for f in (dion2, dion3))
    assert [*two] == [*three]
    changed = [name for name in two if two[name].default != three[name].default]
    assert changed == ["neuron_beta2"] and three["neuron_beta2"].default == 0.95
    assert [two[n].kind for n in two] == [three[n].kind for n in two]


def test_dion3_is_dion2_with_neurons():
    for found, expected in zip(
        run(dion3(0.1, 0.5)), run(dion2(0.1, 0.5, neuron_beta2=0.95)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
        assert found.any()


def test_dion3_needs_a_number():
    with pytest.raises(TypeError, match="neuron_beta2 must be a number, got None"):
        dion3(0.1, neuron_beta2=None)


def test_neuron_beta2_can_be_injected():
    injected = optax.inject_hyperparams(dion3, static_args=STATIC_ARGS)
    tx = injected(0.1, neuron_beta2=lambda step: 0.9 + 0 * step)
    np.testing.assert_allclose(run(tx)[1], run(dion3(0.1, neuron_beta2=0.9))[1], 1e-5)


@pytest.mark.parametrize(
    "sizes, spec", [((8,), ("a",)), ((8,), (None, "a")), ((4, 2), ("a", "b"))]
)
def test_global_dion3_is_the_same_on_every_mesh(sizes, spec):
    arguments = dict(selection="global", ns_dtype=jnp.float32)
    mesh = make_mesh(sizes, "auto")
    given = needed_shardings({"w": place(GRADS[0], mesh, spec)}, "auto")
    sharded = run(
        dion3(0.1, param_shardings=given, **arguments), lambda x: place(x, mesh, spec)
    )
    for found, expected in zip(sharded, run(dion3(0.1, **arguments)), strict=True):
        assert frobenius(found, expected) <= UPDATE
