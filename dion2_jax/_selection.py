"""Which slices of the select axis are updated: count, scores, top-k, gather, scatter.

Arrays are one group's: `[N, n, c]` is N matrices of n slices of length c.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

SCORES = ("l1", "l2", "random")


def slice_count(fraction: float, n: int) -> int:
    """How many of n slices are selected: max(1, ceil(fraction * n)), at most n.

    The product and the ceiling are those of Python floats, as in the reference.
    """
    return min(max(1, math.ceil(fraction * n)), n)


def slice_scores(momentum: jax.Array, axes: tuple[int, ...], score: str) -> jax.Array:
    """float32 norm over `axes` of every slice of one local array."""
    size = jnp.abs(momentum.astype(jnp.float32))
    if score == "l1":
        return jnp.sum(size, axis=axes)
    # Divided by the largest entry first: squares of 1e30 are not float32.
    largest = jnp.max(size, axis=axes, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1)
    norm = jnp.sqrt(jnp.sum(jnp.square(size / scale), axis=axes))
    return _unless_infinite(norm * jnp.squeeze(scale, axes), jnp.squeeze(largest, axes))


def combine_scores(scores: jax.Array, axes: tuple[str, ...], score: str) -> jax.Array:
    """Scores of whole slices from those of their parts on the devices of `axes`."""
    if not axes:
        return scores
    if score == "l1":
        return lax.psum(scores, axes)
    largest = lax.pmax(scores, axes)
    scale = jnp.where(largest > 0, largest, 1)
    norm = jnp.sqrt(lax.psum(jnp.square(scores / scale), axes)) * scale
    return _unless_infinite(norm, largest)


def _unless_infinite(norm, largest):
    """Infinity and NaN as they are, which rank first: inf / inf may rank last."""
    return jnp.where(largest < jnp.inf, norm, largest)


def random_scores(seed: int, count, place, shape: tuple[int, ...]) -> jax.Array:
    """float32 uniform numbers, the same on every device, from seed, step and place.

    Args:
        seed: of all leaves and steps.
        count: int32[], the step.
        place: ints that tell a leaf, and a block of it, from all others.
        shape: of the result.
    """
    key = jax.random.key(seed)
    for number in (count, *place):
        key = jax.random.fold_in(key, number)
    return jax.random.uniform(key, shape, jnp.float32)


def top_slices(scores: jax.Array, k: int) -> jax.Array:
    """int32[N, k]: the k largest of `[N, n]`; ties go to the lower index."""
    return lax.top_k(scores, k)[1]


def ascending(mask: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Indices of the True entries of `[N, n]` in order, and which of the k are real."""
    n = mask.shape[-1]
    order = jnp.where(mask, n - lax.iota(jnp.int32, n)[None], 0)
    value, index = lax.top_k(order, k)
    return index, value > 0


def one_hot(index: jax.Array, valid: jax.Array | None, n: int, dtype) -> jax.Array:
    """`[N, n, k]` with 1 where slice n is the k-th selected."""
    hot = index[:, None, :] == lax.iota(jnp.int32, n)[None, :, None]
    if valid is not None:
        hot = hot & valid[:, None, :]
    return hot.astype(dtype)


def gather(x: jax.Array, index: jax.Array | None, valid: jax.Array | None) -> jax.Array:
    """`[N, k, c]`: the selected slices of `[N, n, c]`; zero where not valid.

    No index: all slices.
    """
    if index is None:
        return x
    picked = jnp.take_along_axis(x, index[:, :, None], axis=1)
    return picked if valid is None else jnp.where(valid[:, :, None], picked, 0)


def scatter(u: jax.Array, index: jax.Array | None, valid: jax.Array | None, n: int):
    """`[N, n, c]` with the selected slices of `[N, k, c]` in place, zero elsewhere.

    No index: all slices.

    A product with a one-hot matrix: exact, since every sum has one term, and XLA fuses
    it into whatever reads the result.
    """
    if index is None:
        return u
    precision = lax.Precision.HIGHEST if u.dtype == jnp.float32 else None
    hot = one_hot(index, valid, n, u.dtype)
    return jnp.einsum("nsk,nkc->nsc", hot, u, precision=precision)
