"""The jitted steps of a run: its state, one training step, one validation batch."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lm.mesh import BATCH
from lm.model import next_token_loss


class TrainState(typing.NamedTuple):
    """What a checkpoint holds: arrays on the mesh, nothing else."""

    step: jax.Array  # int32, steps done
    params: typing.Any
    opt_state: typing.Any
    waits: typing.Any = None  # of --log-stats


class StepReport(typing.NamedTuple):
    """Scalars of one step, for the log."""

    loss: jax.Array  # nats per token, before the update
    learning_rate: jax.Array
    bad_steps: jax.Array  # non-finite gradients in a row, this step included
    stats: typing.Any = None  # of `dion2_jax.stats`


def init_state(tx, params, mesh: Mesh, stats=None) -> TrainState:
    """Step 0. Optimizer state lies as the parameters do, scalars on every device."""
    replicated = NamedSharding(mesh, P())

    def on_mesh(x):
        on = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
        return x if on else jax.device_put(x, replicated)

    # Eagerly: under jit, zeros_like loses the parameter's sharding on Auto axes.
    opt_state = jax.tree.map(on_mesh, tx.init(params))
    waits = None if stats is None else stats.init(params)
    return TrainState(on_mesh(jnp.zeros((), jnp.int32)), params, opt_state, waits)


def make_train_step(graphdef, tx, rate, state: TrainState, stats=None):
    """jitted (state, int32[B, T + 1]) -> (state, StepReport); donates the state."""

    def step(state, tokens):
        def loss_of(params):
            return next_token_loss(nnx.merge(graphdef, params), tokens)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # Updates done before this one: what the optimizer's own schedule reads.
        done = state.step - state.opt_state.total_notfinite
        bad, found, waits = opt_state.notfinite_count, None, None
        if stats is not None:
            found, waits = stats.measure(
                grads, state.opt_state, state.params, state.waits, updates
            )
            keep = lambda new, old: jnp.where(bad > 0, old, new)  # noqa: E731
            waits = jax.tree.map(keep, waits, state.waits)
        report = StepReport(loss, rate(done), bad, found)
        return TrainState(state.step + 1, params, opt_state, waits), report

    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def make_val_loss(graphdef):
    """jitted (params, tokens int32[B, T + 1]) -> mean loss in nats per token."""
    return jax.jit(
        lambda params, tokens: next_token_loss(nnx.merge(graphdef, params), tokens)
    )


def put_batch(mesh: Mesh, tokens, positions: np.ndarray, length: int) -> jax.Array:
    """int32[B@(dp, fsdp), length]: a device's host cuts only that device's windows."""
    return jax.make_array_from_callback(
        (len(positions), length),
        NamedSharding(mesh, P(BATCH, None)),
        lambda index: tokens.cut(positions[index[0]], length),
    )


def value(x: jax.Array) -> np.float32:
    """A replicated scalar, brought to the host; waits for it."""
    return np.asarray(x.addressable_data(0))[()]
