"""Products known to be symmetric: not all is computed, and a team sums half."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# Rows and columns of a matrix unit: smaller blocks would not be computed faster.
TILE = 128


def column_blocks(r: int) -> int:
    """In how many column blocks a symmetric `[r, r]` product is computed."""
    return next((b for b in (4, 2) if r % (b * TILE) == 0), 1)


def computed(r: int) -> float:
    """The share of a symmetric `[r, r]` product that is computed."""
    blocks = column_blocks(r)
    return (blocks + 1) / (2 * blocks)


def summed(r: int) -> int:
    """How many elements of a symmetric `[r, r]` product are summed over a team."""
    return r * r if column_blocks(r) == 1 else r * (r + 1) // 2


def symmetric_product(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    y: jax.Array,
    combine: Callable[[jax.Array], jax.Array] | None = None,
    dtype=jnp.float32,
) -> jax.Array:
    """`x y`, known to be symmetric: of every column block the rows from its diagonal.

    Args:
        product: of two matrices.
        x, y: `[..., r, c]` and `[..., c, r]`.
        combine: sums what is computed over a team; None without a team.
        dtype: of the result, and of what is summed.
    """
    r = x.shape[-2]
    blocks = column_blocks(r)
    if blocks == 1:
        whole = product(x, y).astype(dtype)
        return whole if combine is None else combine(whole)
    size = r // blocks
    starts = range(0, r, size)
    # Of every column block its diagonal tile and what is below.
    if combine is None:
        columns = [
            product(x[..., i:, :], y[..., i : i + size]).astype(dtype) for i in starts
        ]
    else:  # apart: XLA would write a column to HBM to cut the tile off it
        tiles = product(_split(x, -2, blocks), _split(y, -1, blocks)).astype(dtype)
        below = [
            product(x[..., i + size :, :], y[..., i : i + size]).astype(dtype)
            for i in starts[:-1]
        ]
        tiles, below = _summed(tiles, below, combine)
        columns = [
            jnp.concatenate([tiles[..., i, :, :], *below[i : i + 1]], axis=-2)
            for i in range(blocks)
        ]
    lower = jnp.concatenate([_from_above(column, r) for column in columns], axis=-1)
    row, column = _places(r)
    whole = jnp.where(row >= column // size * size, lower, lower.mT)
    # Fused with what uses it, XLA's TPU compiler takes three times as long.
    return lax.optimization_barrier(whole)


def _split(x: jax.Array, axis: int, blocks: int) -> jax.Array:
    """`[..., blocks, m, n]`: equal parts of `x` along `axis`, -2 or -1."""
    return jnp.stack(jnp.split(x, blocks, axis), axis=-3)


def _summed(tiles: jax.Array, below: list, combine) -> tuple[jax.Array, list]:
    """Diagonal tiles and what is below them after `combine`: half of a tile is sent.

    Two tiles travel as one: the lower half of the first, the upper half of the second;
    the diagonal of the second in a row of its own.
    """
    *batch, blocks, size, _ = tiles.shape
    row, column = _places(size)
    lower, diagonal = row >= column, row == column
    first, second = tiles[..., ::2, :, :], tiles[..., 1::2, :, :]
    both = jnp.where(lower, first, second)
    kept = jnp.sum(jnp.where(diagonal, second, 0), axis=-2, dtype=tiles.dtype)
    sent = [*below, both.reshape(*batch, -1, size), kept]
    ends = list(itertools.accumulate(part.shape[-2] for part in sent[:-1]))
    *below, both, kept = jnp.split(
        combine(jnp.concatenate(sent, axis=-2)), ends, axis=-2
    )
    both, kept = both.reshape(*batch, -1, size, size), kept[..., None, :]
    first = jnp.where(lower, both, both.mT)
    second = jnp.where(diagonal, kept, jnp.where(lower, both.mT, both))
    return jnp.stack([first, second], axis=-3).reshape(tiles.shape), below


def _places(n: int) -> tuple[jax.Array, jax.Array]:
    """Row and column of every element of `[n, n]`.

    Not a NumPy mask: it would lie in HBM as a constant, and be read at every product.
    """
    row, column = (lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1))
    return row, column


def _from_above(column, r: int) -> jax.Array:
    """`[..., h, size]` filled up with zeros above, to `[..., r, size]`."""
    missing = r - column.shape[-2]
    return jnp.pad(column, ((0, 0),) * (column.ndim - 2) + ((missing, 0), (0, 0)))
