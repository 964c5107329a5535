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


def join_masks(layouts, masks) -> jax.Array:
    """Where entries of any block are selected, as `join_blocks` joins them."""
    turned = [
        _turned(x, own, layouts[0]) for x, own in zip(masks, layouts, strict=True)
    ]
    return _together(layouts[0], turned, turned)


def join_blocks(layouts, masks, arrays) -> jax.Array:
    """One array of every block of a fused leaf as one, slices as in the first layout.

    Args:
        layouts: of the blocks.
        masks: of every block where its entries are selected, bool `[N, n_local, 1]`,
            or `[N, n_local, c_local]` where any selects along the reduction.
        arrays: of every block `[N, n_local, c_local]`, or of neurons `[N, n_local]`.
    """
    first = layouts[0]
    if len(arrays) == 1:
        return arrays[0]
    if arrays[0].ndim == 3:
        arrays, masks = (
            [_turned(x, own, first) for x, own in zip(each, layouts, strict=True)]
            for each in (arrays, masks)
        )
    else:
        masks = [mask[:, :, 0] for mask in masks]
    return _together(first, arrays, masks)


def _turned(x: jax.Array, own: Layout, first: Layout) -> jax.Array:
    return x if own.select_is_output == first.select_is_output else x.mT


def _together(first: Layout, arrays, masks) -> jax.Array:
    """Blocks apart beside each other; else each where its mask is."""
    if first.apart:
        return jnp.concatenate(arrays, 1 if first.select_is_output else 2)
    joined = jnp.zeros_like(arrays[0])
    for array, mask in zip(arrays, masks, strict=True):
        joined = jnp.where(mask, array, joined)
    return joined
