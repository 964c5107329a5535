"""dion2 under nnx.Optimizer and linen's TrainState, on sharded parameters."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small import mesh_of

import dion2_jax


@pytest.fixture
def mesh():
    mesh = mesh_of("auto")
    with jax.set_mesh(mesh):
        yield mesh


def data(inputs=8, outputs=16):
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (32, inputs))
    return x, x @ jax.random.normal(keys[1], (inputs, outputs))


def sharded(mesh, tree):
    """Kernels by rows, the rest replicated."""
    return jax.tree.map(
        lambda x: jax.device_put(
            x, NamedSharding(mesh, P("x") if x.ndim == 2 else P())
        ),
        tree,
    )


def test_nnx_optimizer_learns_and_keeps_shardings(mesh):
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    nnx.update(model, sharded(mesh, nnx.state(model)))
    shardings = dion2_jax.shardings_of(nnx.state(model, nnx.Param))
    tx = dion2_jax.dion2(0.1, fraction=0.5, param_shardings=shardings)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x, y = data()

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    kernel = model.kernel.get_value()
    assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    matrices = [m for m in jax.tree.leaves(optimizer.opt_state) if m.shape == (8, 16)]
    assert len(matrices) == 1 and float(jnp.abs(matrices[0]).sum()) > 0
    assert matrices[0].sharding.is_equivalent_to(kernel.sharding, 2)


def test_linen_train_state_learns_and_keeps_shardings(mesh):
    x, y = data()
    model = linen.Dense(16)
    params = sharded(mesh, model.init(jax.random.key(1), x)["params"])
    tx = dion2_jax.dion2(
        0.1, fraction=0.5, param_shardings=dion2_jax.shardings_of(params)
    )
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        def loss(p):
            return jnp.mean((state.apply_fn({"params": p}, x) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(20):
        state, value = step(state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
    kernel = state.params["kernel"]
    assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    matrices = [m for m in jax.tree.leaves(state.opt_state) if m.shape == (8, 16)]
    assert len(matrices) == 1
    assert matrices[0].sharding.is_equivalent_to(kernel.sharding, 2)
