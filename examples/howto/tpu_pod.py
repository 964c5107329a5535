"""Train on a TPU pod, or on any set of hosts: the same script runs on each of them.

    python examples/howto/tpu_pod.py                 # one host, or a CPU to try it
    python examples/howto/tpu_pod.py --distributed   # typed on every host of a pod

docs/tpu_pod.md says how to start it on all hosts at once. Off a TPU give each host also
--coordinator HOST:PORT of host 0, --num-processes N and --process-id I.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dion2_jax

WIDTH, BATCH = 256, 512  # the batch of all hosts together


def join(args):
    """Makes one program of all processes; before anything else of JAX."""
    if args.distributed:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # CPU hosts
        jax.distributed.initialize(
            args.coordinator, args.num_processes, args.process_id
        )


def main(steps=20):
    """Trains; returns the losses and the kernel."""
    # All devices of all hosts. Within a host they are neighbours in the mesh.
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("fsdp"))

    def init(key):  # every device makes its own rows: no host holds a whole kernel
        return {"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5}

    params = jax.jit(init, out_shardings=rows)(jax.random.key(0))
    tx = dion2_jax.dion2(0.05, param_shardings=dion2_jax.shardings_of(params))
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, state, x):
        def loss(params):  # the inverse of a shift by one feature
            return jnp.mean((jnp.roll(x, 1, axis=1) @ params["kernel"] - x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    # Each host reads its own part of the data, and hands over only that.
    rng, losses = np.random.default_rng(jax.process_index()), []
    for i in range(steps):
        mine = rng.normal(size=(BATCH // jax.process_count(), WIDTH))
        x = jax.make_array_from_process_local_data(rows, np.float32(mine))
        params, state, loss = step(params, state, x)
        losses.append(float(loss))  # the same on every host
        if jax.process_index() == 0:  # one host speaks, all compute
            print(f"step {i:3}  loss {losses[-1]:.4f}", flush=True)
    return losses, params["kernel"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    join(parser.parse_args())
    main()
