"""Train a scanned transformer with FSDP x TP on a mesh of Explicit axes.

    python examples/howto/scanned_fsdp_tp.py

Kernels of all layers are stacked, float32[layer, in, out], each divided over both mesh
axes. Dion2 must be told in and out; shardings it reads from the arrays' Explicit types.
"""

import argparse  # its source is the text
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dion2_jax

L, D, F, HEADS, BATCH, LENGTH = 4, 64, 256, 4, 32, 32
SHAPES = dict.fromkeys(("query", "key", "value", "out"), (L, D, D))
SHAPES |= {"up": (L, D, F), "down": (L, F, D), "embed": (256, D)}
SPECS = dict.fromkeys(SHAPES, P(None, "fsdp", "tp")) | {"embed": P()}
SPECS["out"] = SPECS["down"] = P(None, "tp", "fsdp")
AXES = dict.fromkeys(SHAPES, optax.contrib.MuonDimensionNumbers(1, 2)) | {"embed": None}


def block(x, layer):
    # Causal attention over heads@tp, then an MLP, on float32[B@fsdp, T, D].
    def dense(x, name):  # a kernel is whole over fsdp only while it is used
        spec = P(*(None if axis == "fsdp" else axis for axis in SPECS[name][1:]))
        weight, out = jax.sharding.reshard(layer[name], spec), P("fsdp", None, spec[1])
        return jnp.einsum("bti,io->bto", x, weight, out_sharding=out)

    y, heads = jax.nn.standardize(x), (*x.shape[:2], HEADS, D // HEADS)
    qkv = (dense(y, name).reshape(heads) for name in ("query", "key", "value"))
    y = jax.nn.dot_product_attention(*qkv, is_causal=True)
    x = x + dense(y.reshape(x.shape), "out")
    return x + dense(jax.nn.relu(dense(jax.nn.standardize(x), "up")), "down"), None


def loss_of(params, tokens):
    """Mean cross-entropy in nats of tokens[:, 1:]; uint8[B@fsdp, T + 1]."""
    x = params["embed"].at[tokens[:, :-1]].get(out_sharding=P("fsdp", None, None))
    x, _ = jax.lax.scan(block, x, {k: w for k, w in params.items() if k != "embed"})
    logits, targets = jax.nn.standardize(x) @ params["embed"].T, tokens[:, 1:]
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, 256)).mean()


def main(steps=40):
    """Trains; returns the last loss, the parameters and the optimizer's state."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    text = np.resize(np.fromfile(argparse.__file__, np.uint8), (2000, LENGTH + 1))
    rng = np.random.default_rng(0)
    tx = dion2_jax.dion2(0.03, adam_learning_rate=0.003, weight_dimension_numbers=AXES)

    @jax.jit
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    with jax.set_mesh(mesh):
        params = {k: rng.normal(size=s) / s[1] ** 0.5 for k, s in SHAPES.items()}
        params = jax.device_put(jax.tree.map(np.float32, params), SPECS)
        print(dion2_jax.describe(params, weight_dimension_numbers=AXES))
        state = jax.jit(tx.init)(params)
        for i in range(steps):
            tokens = jax.device_put(rng.choice(text, BATCH), P("fsdp"))
            params, state, loss = step(params, state, tokens)
            print(f"step {i:3}  loss {loss:.3f} nats a byte")
    return loss, params, state


if __name__ == "__main__":
    main()
