"""Train a Flax NNX model with Dion2, its kernels divided over all devices.

    python examples/howto/nnx_training.py

A network reads 8 bytes of a module's source text and predicts the next. A CPU plays
eight devices. Prints what Dion2 will do with every leaf, then the loss.
"""

import argparse  # its source is the text
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import dion2_jax

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 32, 256, 256


class Model(nnx.Module):
    """int32[B, CONTEXT] -> logits float32[B, 256]; kernels float32[in@fsdp, out]."""

    def __init__(self, rngs):
        rows = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", None))
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.up = nnx.Linear(CONTEXT * WIDTH, HIDDEN, kernel_init=rows, rngs=rngs)
        self.middle = nnx.Linear(HIDDEN, HIDDEN, kernel_init=rows, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, 256, kernel_init=rows, rngs=rngs)

    def __call__(self, tokens):
        x = nnx.relu(self.up(self.embed(tokens).reshape(len(tokens), -1)))
        return self.head(x + nnx.relu(self.middle(x)))


@nnx.jit
def train_step(model, optimizer, tokens):
    """One step on int32[B, CONTEXT + 1]; returns the loss before it."""

    def loss(model):
        logits = model(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1])
        return losses.mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main(steps=60):
    """Trains; returns the losses, the model and the optimizer."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    text = np.fromfile(argparse.__file__, np.uint8)
    rng, losses = np.random.default_rng(0), []
    with jax.set_mesh(mesh):
        model = Model(nnx.Rngs(0))
        params = nnx.state(model, nnx.Param)
        params = jax.device_put(params, nnx.get_named_sharding(params, mesh))
        nnx.update(model, params)
        shardings = dion2_jax.shardings_of(params)  # not needed on Explicit axes
        tx = dion2_jax.dion2(0.05, adam_learning_rate=0.005, param_shardings=shardings)
        print(dion2_jax.describe(params))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for step in range(steps):
            starts = rng.integers(len(text) - CONTEXT, size=(BATCH, 1))
            tokens = text[starts + np.arange(CONTEXT + 1)].astype(np.int32)
            tokens = jax.device_put(tokens, PartitionSpec("fsdp"))
            losses.append(float(train_step(model, optimizer, tokens)))
            if step % 10 == 0:
                print(f"step {step:3}  loss {losses[-1]:.3f} nats a byte")
    return losses, model, optimizer


if __name__ == "__main__":
    main()
