"""Parameters and optimizer state that are born sharded, as MaxText makes them.

    python examples/howto/abstract_init.py

The model names the axes of its parameters; rules map names to mesh axes. `eval_shape`
tells shapes and names of the whole training state without an array, then
`jit(init, out_shardings=...)` makes every array where it belongs: never whole on one
device. The momentum takes the names of its parameter. A CPU plays eight devices.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import dion2_jax

RULES = (("embed", "fsdp"), ("mlp", "tensor"), ("vocab", None))
WIDTH, HIDDEN, VOCAB = 64, 256, 512


class Model(nn.Module):
    """int32[B, T] -> logits float32[B, T, VOCAB], with named axes."""

    @nn.compact
    def __call__(self, tokens):
        def dense(size, name, *axes):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
            return nn.Dense(size, use_bias=False, kernel_init=init, name=name)

        init, axes = nn.initializers.normal(1), ("vocab", "embed")
        init = nn.with_logical_partitioning(init, axes)
        x = nn.Embed(VOCAB, WIDTH, embedding_init=init)(tokens)
        y = nn.relu(dense(HIDDEN, "up", "embed", "mlp")(x))
        x = x + dense(WIDTH, "down", "mlp", "embed")(y)
        return dense(VOCAB, "logits", "embed", "vocab")(x)


def main():
    """Makes the state, takes a step; returns the state, and it after the step."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    model, tokens = Model(), jnp.ones((8, 16), jnp.int32)

    def shardings_of(init):  # of what `init` makes, by the names in it
        names = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
        return nn.logical_to_mesh_sharding(names, mesh, RULES)

    # On Auto axes Dion2 must know where the parameters will be.
    shardings = shardings_of(lambda key: model.init(key, tokens)["params"])
    tx = dion2_jax.dion2(0.02, param_shardings=shardings)

    def init_state(key):
        params = model.init(key, tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    init = jax.jit(init_state, out_shardings=shardings_of(init_state))
    state = init(jax.random.key(0))

    @jax.jit
    def train_step(state, tokens):
        def loss(params):
            logits = state.apply_fn({"params": params}, tokens)
            return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    after = train_step(state, tokens)
    for path, x in jax.tree.leaves_with_path(nn.unbox(after)):
        print(f"{jax.tree_util.keystr(path):95} {jax.typeof(x)} {x.sharding.spec}")
    return state, after


if __name__ == "__main__":
    main()
