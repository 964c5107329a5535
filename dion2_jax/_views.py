"""A leaf's shard as matrices `[N, n, c]`, the select axis first, and back."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from dion2_jax._layout import Layout


def to_matrices(x: jax.Array, layout: Layout) -> jax.Array:
    """`[N, n/p, c/q]`: the local shard with batch, select and other axes in front."""
    sizes = (layout.local_sizes(axes) for axes in (layout.batch, layout.select))
    lead = tuple(math.prod(s) for s in sizes)
    order = layout.batch + layout.select + layout.other
    return x.transpose(order).reshape(*lead, -1)


def from_matrices(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `to_matrices`."""
    order = layout.batch + layout.select + layout.other
    x = x.reshape(layout.local_sizes(order))
    return x.transpose([order.index(a) for a in range(len(order))])


def per_slice(x: jax.Array, layout: Layout) -> jax.Array:
    """`[N, n/p]` in the axes of the leaf, size 1 along the other axes."""
    order = layout.batch + layout.select + layout.other
    x = x.reshape(
        *layout.local_sizes(layout.batch + layout.select), *(1 for _ in layout.other)
    )
    return x.transpose([order.index(a) for a in range(len(order))])


def matrices_of(x: jax.Array, layout: Layout) -> jax.Array:
    """`[N, n_local, c_local]`: a leaf, or a fused one's block where it is apart."""
    x = to_matrices(x, layout)
    return cut_out(x, layout, axis=1 if layout.select_is_output else 2)


def cut_out(x: jax.Array, layout: Layout, axis: int) -> jax.Array:
    """A layout's block along the output, which is `axis`, where it is apart."""
    if layout.block is None or not layout.apart:
        return x
    start, size = layout.block
    return lax.slice_in_dim(x, start, start + size, axis=axis)


def neurons_of(nu: jax.Array, layout: Layout) -> jax.Array:
    """`[N, n_local]` from the leaf's second moments, size 1 along the other axes."""
    order = layout.batch + layout.select + layout.other
    count = math.prod(layout.local_sizes(layout.batch))
    n = math.prod(layout.local_sizes(layout.select))
    return cut_out(nu.transpose(order).reshape(count, n), layout, axis=1)


def join_blocks(layouts, blocks):
    """The blocks of a fused leaf as one matrix, slices as in the first layout.

    Args:
        layouts: of the blocks.
        blocks: of every block the update `[N, n_local, c_local]`, bool
            `[N, n_local, 1 or c_local]` where it was selected, and of neurons their
            factors and second moments `[N, n_local]`, or None.
    """
    first = layouts[0]
    turn = lambda x, like: (  # noqa: E731
        x if like.select_is_output == first.select_is_output else x.mT
    )
    updates, masks = [], []
    for layout, (update, hot, _, _) in zip(layouts, blocks, strict=True):
        if any(not x.select_is_output for x in layouts):
            hot = jnp.broadcast_to(hot, update.shape)
        updates.append(turn(update, layout))
        masks.append(turn(hot, layout))

    def together(arrays, axis):
        if first.apart:
            return jnp.concatenate(arrays, axis)
        joined = jnp.zeros_like(arrays[0])
        for array, mask in zip(arrays, masks, strict=True):
            own = mask if array.ndim == 3 else mask[:, :, 0]
            joined = jnp.where(own, array, joined)
        return joined

    output = 1 if first.select_is_output else 2
    factors, seconds = ([block[i] for block in blocks] for i in (2, 3))
    neurons = factors[0] is not None
    return (
        together(updates, output),
        together(masks, output),
        together(factors, 1) if neurons else None,
        together(seconds, 1) if neurons else None,
    )
