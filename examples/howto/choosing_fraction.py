"""Choose the fraction by what it selects, and look at the loss.

    python examples/howto/choosing_fraction.py

One run tells what every fraction would select of the same momentum. Much more than its
share: slice norms are heavy-tailed, a smaller fraction leaves little behind. About its
share: they are flat. The loss of a run at each, at its best learning rate, decides.
"""

import argparse  # its source is the text
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dion2_jax

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 32, 128, 256
SHAPES = dict(embed=(256, WIDTH), up=(CONTEXT * WIDTH, HIDDEN))
SHAPES |= dict(middle=(HIDDEN, HIDDEN), head=(HIDDEN, 256))
RATES, ADAM = np.float32([0.1, 0.2, 0.4, 0.8]), {"adam_learning_rate": 0.005}


def loss_of(params, tokens):
    """Mean cross-entropy in nats of the last of int32[B, CONTEXT + 1]."""
    x = params["embed"][tokens[:, :-1]].reshape(len(tokens), -1)
    x = jax.nn.relu(x @ params["up"])
    logits = (x + jax.nn.relu(x @ params["middle"])) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()


def main(fractions=(1.0, 0.5, 0.25, 0.125), steps=80):
    """Returns {fraction: (its loss over the last steps, share selected, cost)}."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("fsdp"))
    rng = np.random.default_rng(0)
    start = {k: rng.normal(size=s) / s[0] ** 0.5 for k, s in SHAPES.items()}
    start = jax.device_put(jax.tree.map(np.float32, start), rows)
    text = np.fromfile(argparse.__file__, np.uint8).astype(np.int32)
    at = rng.integers(len(text) - CONTEXT, size=(steps, BATCH, 1))
    batches = text[at + np.arange(CONTEXT + 1)]
    batches = jax.device_put(batches, NamedSharding(mesh, P(None, "fsdp")))
    stats = {f: dion2_jax.stats(f, param_shardings=rows) for f in fractions}

    def train(fraction, rate, measured=()):
        tx = dion2_jax.dion2(rate, fraction, param_shardings=rows, **ADAM)

        def step(carry, tokens):
            params, state = carry
            value, grads = jax.value_and_grad(loss_of)(params, tokens)
            found = [stats[f].measure(grads, state, params)[0] for f in measured]
            updates, state = tx.update(grads, state, params)
            shares = [report["groups"]["#0"]["selected_mass"] for report in found]
            return (optax.apply_updates(params, updates), state), (value, shares)

        return jax.lax.scan(step, (start, tx.init(start)), batches)[1]

    train = jax.jit(train, static_argnums=(0, 2))
    _, shares = train(0.25, RATES[1], tuple(fractions))
    found = {}
    print("  fraction   selects      loss   at rate        kB     MFLOP")
    for fraction, share in zip(fractions, shares, strict=True):
        losses = [float(train(fraction, rate)[0][-10:].mean()) for rate in RATES]
        loss, rate = min(zip(losses, RATES, strict=True))
        cost = dion2_jax.describe(start, fraction).total
        row = fraction, float(share[-10:].mean()), loss, rate, cost.bytes / 1e3
        print("".join(f"{x:10.3f}" for x in (*row, cost.operations / 1e6)))
        found[fraction] = loss, row[1], cost
    return found


if __name__ == "__main__":
    main()
