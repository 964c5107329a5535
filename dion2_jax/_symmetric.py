"""Products known to be symmetric: half is computed, and half is summed over a team."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
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
    columns = [
        product(x[..., i * size :, :], y[..., i * size : (i + 1) * size]).astype(dtype)
        for i in range(blocks)
    ]
    if combine is not None:
        columns = _summed(columns, combine)
    lower = jnp.concatenate([_from_above(column, r) for column in columns], axis=-1)
    block = np.arange(r) // size
    whole = jnp.where(block[:, None] >= block, lower, lower.mT)
    # Fused with what uses it, XLA's TPU compiler takes three times as long.
    return lax.optimization_barrier(whole)


def _summed(columns: list, combine) -> list:
    """The column blocks after `combine`, of whose diagonal tiles one half is sent.

    Two tiles travel as one: the lower half of the first, the upper half of the second;
    the diagonal of the second in a row of its own.
    """
    size = columns[0].shape[-1]
    at = np.arange(size)
    lower, diagonal = at[:, None] >= at, at[:, None] == at
    below = [column[..., size:, :] for column in columns[:-1]]
    tiles = [column[..., :size, :] for column in columns]
    pairs = list(zip(tiles[::2], tiles[1::2], strict=True))
    sent = below + [jnp.where(lower, first, second) for first, second in pairs]
    for _, second in pairs:
        kept = jnp.where(diagonal, second, 0)
        sent.append(jnp.sum(kept, axis=-2, keepdims=True, dtype=second.dtype))
    ends = list(itertools.accumulate(part.shape[-2] for part in sent[:-1]))
    parts = jnp.split(combine(jnp.concatenate(sent, axis=-2)), ends, axis=-2)
    below, parts = parts[: len(below)], parts[len(below) :]
    tiles = []
    for both, row in zip(parts[: len(pairs)], parts[len(pairs) :], strict=True):
        tiles.append(jnp.where(lower, both, both.mT))
        tiles.append(jnp.where(diagonal, row, jnp.where(lower, both.mT, both)))
    rows = [[tile, part] for tile, part in zip(tiles, below, strict=False)]
    return [jnp.concatenate(column, axis=-2) for column in rows] + [tiles[-1]]


def _from_above(column, r: int) -> jax.Array:
    """`[..., h, size]` filled up with zeros above, to `[..., r, size]`."""
    missing = r - column.shape[-2]
    return jnp.pad(column, ((0, 0),) * (column.ndim - 2) + ((missing, 0), (0, 0)))
