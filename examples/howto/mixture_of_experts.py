"""Train a mixture of experts with Dion2: expert parallelism beside FSDP.

    python examples/howto/mixture_of_experts.py

Kernels of experts are float32[expert, in, out]: every expert is a matrix of its own, so
axis 0 is a batch axis. Experts are dealt out over one mesh axis, and the rows of each
over another; nothing of Dion2 travels over the first. The router goes to AdamW, as its
few columns are no map between features. A CPU plays eight devices.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dion2_jax

EXPERTS, WIDTH, HIDDEN, BATCH = 8, 32, 64, 512
EXPERT = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
AXES = {"router": None, "up": EXPERT, "down": EXPERT}  # None: AdamW
SHAPES = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN)}
SHAPES |= {"down": (EXPERTS, HIDDEN, WIDTH)}


def moe(params, x):
    """float32[B, WIDTH] through its two best experts, weighed by the router."""
    gates = jax.nn.softmax(x @ params["router"])
    best, which = jax.lax.top_k(gates, 2)
    gates = jnp.einsum("bk,bke->be", best, jax.nn.one_hot(which, EXPERTS))
    hidden = jax.nn.relu(jnp.einsum("bi,eih->ebh", x, params["up"]))
    return jnp.einsum("be,ebh,eho->bo", gates, hidden, params["down"])


def main(steps=100):
    """Trains towards a random mixture; returns losses, parameters and the table."""
    mesh = jax.make_mesh((4, 2), ("expert", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    whole, dealt = NamedSharding(mesh, P()), NamedSharding(mesh, P("expert", "fsdp"))
    shardings = {"router": whole, "up": dealt, "down": dealt}

    def init(key):
        params = {}
        for name, shape in SHAPES.items():
            key, use = jax.random.split(key)
            params[name] = jax.random.normal(use, shape) / shape[-2] ** 0.5
        return params

    init = jax.jit(init, out_shardings=shardings)
    params, teacher = init(jax.random.key(0)), init(jax.random.key(1))
    arguments = {"weight_dimension_numbers": AXES, "param_shardings": shardings}
    tx = dion2_jax.dion2(0.02, adam_learning_rate=0.01, **arguments)
    table = dion2_jax.describe(params, **arguments)
    print(table)

    @jax.jit
    def step(params, state, key):
        def error(params):
            x = jax.random.normal(key, (BATCH, WIDTH))
            return jnp.mean((moe(params, x) - moe(teacher, x)) ** 2)

        loss, grads = jax.value_and_grad(error)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for i, key in enumerate(jax.random.split(jax.random.key(2), steps)):
        params, state, loss = step(params, state, key)
        losses.append(float(loss))
        if i % 20 == 0:
            print(f"step {i:3}  mean squared error {losses[-1]:.4f}")
    return losses, params, table


if __name__ == "__main__":
    main()
