"""A GPT in Flax NNX: RMSNorm, rotary attention, QK norm, ReLU-squared MLP.

Shapes: B sequences, T tokens, D width, H heads of size K, F MLP width, V tokens in the
vocabulary. `float32[D@fsdp, F@tp]` is a matrix whose rows are divided over the mesh
axis fsdp and whose columns over tp. Every parameter carries its layout as the metadata
`layout`; a kernel is gathered over fsdp where it is used, and its gradient comes back
divided over fsdp: fully sharded data parallelism.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lm.mesh import BATCH, einsum, gathered, place, take_rows


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; `scan` stacks the layers' parameters as [L, ...]."""

    vocab: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 2
    mlp: int = 512
    scan: bool = False
    dtype: str = "float32"  # of activations and matrix products; parameters are float32


def rms_norm(x):
    """x over its root mean square along the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)
    return (x32 * scale).astype(x.dtype)


def rotary(x):
    """[B, T, H, K] turned by its position, a pair (i, i + K/2) at a time."""
    length, half = x.shape[1], x.shape[3] // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]
    cos = jnp.cos(angle)[None, :, None, :].astype(x.dtype)
    sin = jnp.sin(angle)[None, :, None, :].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)


class Norm(nnx.Module):
    """RMSNorm with a learned scale [D], replicated."""

    def __init__(self, width):
        self.scale = nnx.Param(jnp.ones(width), layout=P(None))

    def __call__(self, x):
        return rms_norm(x) * self.scale[...].astype(x.dtype)[None, None, :]


class Linear(nnx.Module):
    """[..., in] -> [..., out] by a kernel [in, out], without bias."""

    def __init__(self, n_in, n_out, layout, rngs, *, gain=1.0):
        kernel = jax.random.normal(rngs.params(), (n_in, n_out)) * gain * n_in**-0.5
        self.kernel = nnx.Param(kernel, layout=layout)
        self.layout = layout

    def __call__(self, x):
        weight = place(self.kernel[...].astype(x.dtype), gathered(self.layout))
        return einsum(
            "bti,io->bto", x, weight, P(BATCH, None, gathered(self.layout)[1])
        )


class Attention(nnx.Module):
    """Causal self-attention; heads are divided over tp."""

    def __init__(self, config, rngs):
        width, self.heads = config.width, config.heads
        self.query = Linear(width, width, P("fsdp", "tp"), rngs)
        self.key = Linear(width, width, P("fsdp", "tp"), rngs)
        self.value = Linear(width, width, P("fsdp", "tp"), rngs)
        gain = (2 * config.layers) ** -0.5  # the residual stream keeps its scale
        self.out = Linear(width, width, P("tp", "fsdp"), rngs, gain=gain)

    def __call__(self, x):
        batch, length, width = x.shape
        by_head = (batch, length, self.heads, width // self.heads)
        q, k, v = (f(x).reshape(by_head) for f in (self.query, self.key, self.value))
        q, k = rotary(rms_norm(q)), rotary(rms_norm(k))
        heads = P(BATCH, "tp", None, None)
        scores = einsum("bqhk,bthk->bhqt", q, k, heads).astype(jnp.float32)
        scores = scores * by_head[-1] ** -0.5
        causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        y = einsum(
            "bhqt,bthk->bqhk", weights.astype(x.dtype), v, P(BATCH, None, "tp", None)
        )
        return self.out(y.reshape(batch, length, width))


class MLP(nnx.Module):
    """[B, T, D] -> [B, T, F], ReLU squared -> [B, T, D]; F is divided over tp."""

    def __init__(self, config, rngs):
        self.up = Linear(config.width, config.mlp, P("fsdp", "tp"), rngs)
        gain = (2 * config.layers) ** -0.5
        self.down = Linear(config.mlp, config.width, P("tp", "fsdp"), rngs, gain=gain)

    def __call__(self, x):
        return self.down(jnp.square(jax.nn.relu(self.up(x))))


class Block(nnx.Module):
    """One layer: x + attention, then x + MLP, each on the normalized x."""

    def __init__(self, config, rngs):
        self.attention_norm = Norm(config.width)
        self.attention = Attention(config, rngs)
        self.mlp_norm = Norm(config.width)
        self.mlp = MLP(config, rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nnx.Module):
    """int32[B, T] -> [B, T, D] by a table [V, D@fsdp]."""

    def __init__(self, config, rngs):
        table = jax.random.normal(rngs.params(), (config.vocab, config.width))
        self.embedding = nnx.Param(table, layout=P(None, "fsdp"))
        self.dtype = config.dtype

    def __call__(self, tokens):
        table = place(self.embedding[...].astype(self.dtype), P(None, None))
        return take_rows(table, tokens, P(BATCH, None, None))


class GPT(nnx.Module):
    """int32[B, T] -> logits float32[B, T, V]."""

    def __init__(self, config, rngs):
        self.embed = Embedding(config, rngs)
        if config.scan:

            @nnx.split_rngs(splits=config.layers)
            @nnx.vmap(in_axes=0, out_axes=0)
            def stack(rngs):
                return Block(config, rngs)

            self.blocks = stack(rngs)
        else:
            self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = Norm(config.width)
        self.head = Linear(config.width, config.vocab, P("fsdp", "tp"), rngs)
        self.scan = config.scan

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.scan:
            layer = nnx.scan(
                lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )
            x = layer(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def next_token_loss(model: GPT, tokens) -> jax.Array:
    """Mean cross-entropy in nats of predicting tokens[:, 1:]; int32[B, T + 1]."""
    logits = model(tokens[:, :-1])
    # A one-hot sum, not a gather: XLA fuses it, and it needs no layout rule of its own.
    target = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1], dtype=logits.dtype)
    picked = jnp.sum(logits * place(target, P(BATCH, None, "tp")), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def init_sharded(config: GPTConfig, seed: int, mesh):
    """(graphdef, params): every parameter is born in its layout, never whole.

    `params` is an nnx.State of Params, the same on every mesh for the same seed.
    """

    def make():
        return nnx.split(GPT(config, nnx.Rngs(params=seed)))

    graphdef, abstract = nnx.eval_shape(make)

    def sharding(param):
        stacked = (None,) * (len(param.shape) - len(param.layout))
        return NamedSharding(mesh, P(*stacked, *param.layout))

    shardings = jax.tree.map(
        sharding, abstract, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return graphdef, jax.jit(lambda: make()[1], out_shardings=shardings)()
