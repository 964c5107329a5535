"""Train a Flax linen model with Dion2 in a TrainState, sharded over all devices.

    python examples/howto/linen_train_state.py

A network reads 8 bytes of a module's source text and predicts the next. A CPU plays
eight devices. Prints what Dion2 will do with every leaf, then the loss.
"""

import argparse  # its source is the text
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dion2_jax

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 32, 256, 256


class Model(nn.Module):
    """int32[B, CONTEXT] -> logits float32[B, 256]; kernels float32[in@fsdp, out]."""

    @nn.compact
    def __call__(self, tokens):
        rows = nn.with_partitioning(nn.initializers.lecun_normal(), ("fsdp", None))
        x = nn.Embed(256, WIDTH)(tokens).reshape(len(tokens), -1)
        x = nn.relu(nn.Dense(HIDDEN, kernel_init=rows)(x))
        x = x + nn.relu(nn.Dense(HIDDEN, kernel_init=rows)(x))
        return nn.Dense(256, kernel_init=rows, name="head")(x)


@jax.jit
def train_step(state, tokens):
    """One step on int32[B, CONTEXT + 1]; returns the state and the loss before it."""

    def loss(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1])
        return losses.mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def main(steps=60):
    """Trains; returns the losses and the state."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    text = np.fromfile(argparse.__file__, np.uint8)
    rng = np.random.default_rng(0)
    model = Model()
    boxed = model.init(jax.random.key(0), np.zeros((1, CONTEXT), np.int32))["params"]
    # Embedding and biases have no annotation: get_sharding replicates them.
    params = jax.device_put(nn.unbox(boxed), nn.get_sharding(boxed, mesh))
    shardings = dion2_jax.shardings_of(params)
    tx = dion2_jax.dion2(0.05, adam_learning_rate=0.005, param_shardings=shardings)
    print(dion2_jax.describe(params))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    losses = []
    for step in range(steps):
        starts = rng.integers(len(text) - CONTEXT, size=(BATCH, 1))
        tokens = text[starts + np.arange(CONTEXT + 1)].astype(np.int32)
        tokens = jax.device_put(tokens, NamedSharding(mesh, P("fsdp")))
        state, loss = train_step(state, tokens)
        losses.append(float(loss))
        if step % 10 == 0:
            print(f"step {step:3}  loss {losses[-1]:.3f} nats a byte")
    return losses, state


if __name__ == "__main__":
    main()
