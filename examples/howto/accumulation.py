"""Accumulate gradients over micro-batches, and pay for Dion2's exchange once.

    python examples/howto/accumulation.py

`optax.MultiSteps` runs the whole update at every micro-batch and keeps only the last:
exchange and Newton-Schulz are paid every time. A scan that sums the gradients before
`update` has the same result and pays once. Prints the all-to-alls of both compiled
programs. A CPU plays eight devices.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dion2_jax

MICRO, BATCH, WIDTH, STEPS = 4, 64, 64, 5


def loss_of(params, x):
    return jnp.mean((x - jnp.tanh(x @ params["in"]) @ params["out"]) ** 2)


def main():
    """Returns the parameters by both ways, and the all-to-alls of a step of each."""
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    rows, keys = NamedSharding(mesh, P("fsdp")), jax.random.split(jax.random.key(0), 3)
    params = {
        name: jax.device_put(jax.random.normal(key, (WIDTH, WIDTH)) / 8, rows)
        for name, key in zip(("in", "out"), keys[:2], strict=True)
    }
    batches = jax.random.normal(keys[2], (STEPS, MICRO, BATCH, WIDTH))
    batches = jax.device_put(batches, NamedSharding(mesh, P(None, None, "fsdp")))
    tx = dion2_jax.dion2(0.02, param_shardings=rows)
    multi = optax.MultiSteps(tx, MICRO)

    @jax.jit
    def whole_step(params, state, batch):
        # batch: float32[MICRO, BATCH, WIDTH]
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss_of)(params, x)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
        grads = jax.tree.map(lambda g: g / MICRO, total)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def micro_step(params, state, x):
        updates, state = multi.update(jax.grad(loss_of)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):  # a jitted init on the mesh: the steps compile once
        once = params, jax.jit(tx.init)(params)
        multiple = params, jax.jit(multi.init)(params)
    accumulated = all_to_alls(whole_step, *once, batches[0])
    repeated = MICRO * all_to_alls(micro_step, *multiple, batches[0, 0])
    for batch in batches:
        once = whole_step(*once, batch)
        for x in batch:
            multiple = micro_step(*multiple, x)
    apart = max(float(jnp.abs(once[0][k] - multiple[0][k]).max()) for k in params)
    print(f"all-to-alls a step: {accumulated}, with optax.MultiSteps {repeated}")
    print(f"parameters after {STEPS} steps differ by {apart:.1e} at most")
    return once[0], multiple[0], accumulated, repeated


def all_to_alls(function, *args):
    return function.lower(*args).compile().as_text().count(" all-to-all(")


if __name__ == "__main__":
    main()
