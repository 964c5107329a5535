"""Choose the fraction: loss, traffic and arithmetic of short runs at several of them.

    python examples/howto/choosing_fraction.py

Traffic and arithmetic are known before a run, from `describe`; the loss is not. Every
fraction is given its own best learning rate. Put your model here, with as many steps as
you can pay for, and take the smallest fraction whose loss is good enough. A CPU plays
eight devices.
"""

import argparse  # its source is the text
import functools
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dion2_jax

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 32, 128, 256
SHAPES = {"embed": (256, WIDTH), "up": (CONTEXT * WIDTH, HIDDEN)}
SHAPES |= {"middle": (HIDDEN, HIDDEN), "head": (HIDDEN, 256)}
RATES = np.float32([0.1, 0.2, 0.4, 0.8])


def loss_of(params, tokens):
    """Mean cross-entropy in nats of the last of int32[B, CONTEXT + 1]."""
    x = params["embed"][tokens[:, :-1]].reshape(len(tokens), -1)
    x = jax.nn.relu(x @ params["up"])
    logits = (x + jax.nn.relu(x @ params["middle"])) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1])
    return losses.mean()


def main(fractions=(1.0, 0.5, 0.25, 0.125), steps=80):
    """Returns {fraction: (its loss over the last steps, what a step costs)}."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("fsdp"))
    rng = np.random.default_rng(0)
    start = {k: rng.normal(size=s) / s[0] ** 0.5 for k, s in SHAPES.items()}
    start = jax.device_put(jax.tree.map(np.float32, start), rows)
    text = np.fromfile(argparse.__file__, np.uint8)
    starts = rng.integers(len(text) - CONTEXT, size=(steps, BATCH, 1))
    batches = text[starts + np.arange(CONTEXT + 1)].astype(np.int32)
    batches = jax.device_put(batches, NamedSharding(mesh, P(None, "fsdp")))

    @functools.partial(jax.jit, static_argnums=0)
    def train(fraction, rate):
        arguments = {"adam_learning_rate": 0.005, "param_shardings": rows}
        tx = dion2_jax.dion2(rate, fraction, **arguments)

        def step(carry, tokens):
            value, grads = jax.value_and_grad(loss_of)(carry[0], tokens)
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), value

        return jax.lax.scan(step, (start, tx.init(start)), batches)[1]

    found = {}
    print("fraction  loss at rate   kB and MFLOP a step and device")
    for fraction in fractions:
        losses = [float(jnp.mean(train(fraction, rate)[-10:])) for rate in RATES]
        loss, rate = min(zip(losses, RATES, strict=True))
        cost = dion2_jax.describe(start, fraction).total
        found[fraction] = loss, cost
        traffic, work = cost.bytes / 1e3, cost.operations / 1e6
        print(f"{fraction:8}  {loss:.3f}   {rate:4.2f}  {traffic:6.1f}  {work:9.2f}")
    return found


if __name__ == "__main__":
    main()
