"""Newton-Schulz: the orthogonal factor of a matrix by matrix products alone.

Matrices are `[..., r, c]`; the Gram matrix is formed over the rows, so the caller
makes the rows the short side. A team of devices may hold one matrix in blocks of
columns `[..., r, c/t]`: `combine` then sums over the team what runs over columns.
"""

import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

Row = tuple[float, float, float]

COEFFS: dict[str, tuple[Row, ...]] = {
    # Amsel, Persson, Musco, Gower: The Polar Express, 2025, arXiv:2505.16932; five
    # iterations, cushion 2, safety factor 1.02 in all polynomials but the last.
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # Ahn et al.: Dion, 2025, arXiv:2504.05295, code at github.com/microsoft/dion;
    # the preset "dion" of optax.contrib.muon.
    "classic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Jordan et al.: Muon, 2024, kellerjordan.github.io/posts/muon.
    "muon": ((3.4445, -4.7750, 2.0315),),
}

# Polar Express divides by a little more than the norm: the safety factor above.
_NORM_SCALE = {"polar_express": 1.02}

# Powers of two under one of which any float32 norm squares within range. The first
# is taken wherever it can be, so ordinary matrices are not scaled at all.
_SCALES = (1.0, 2.0**-80, 2.0**80)

# Added to the eigenvalues of the Gram matrix, which are at most 1. Rounding may turn
# a small one negative, and the polynomials send negative numbers to infinity.
_GRAM_SHIFT = 2.0**-22


def newton_schulz_table(
    ns_coeffs: str | Sequence, ns_steps: int
) -> tuple[tuple[Row, ...], float]:
    """The (a, b, c) of every iteration, and what scales the norm divided by.

    Args:
        ns_coeffs: name of a preset (cut, or its last row repeated, to `ns_steps`
            rows), a table of `ns_steps` rows, or one (a, b, c) for all iterations.
        ns_steps: number of iterations, at least 1.

    Returns:
        `ns_steps` rows (a, b, c) and the factor on the Frobenius norm.

    Raises:
        TypeError: `ns_steps` is not an int, or `ns_coeffs` not numbers.
        ValueError: no such preset, wrong number of rows or of numbers in a row.
    """
    try:
        steps = operator.index(ns_steps)
    except TypeError:
        steps = None
    if steps is None or isinstance(ns_steps, bool):
        raise TypeError(f"ns_steps must be an int of at least 1, got {ns_steps!r}")
    if steps < 1:
        raise ValueError(f"ns_steps must be at least 1, got {ns_steps!r}")
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in COEFFS:
            raise ValueError(
                f"ns_coeffs must be one of {', '.join(map(repr, COEFFS))}, a table of "
                f"ns_steps rows (a, b, c), or one (a, b, c), got {ns_coeffs!r}"
            )
        rows = COEFFS[ns_coeffs]
        rows = rows[:steps] + rows[-1:] * (steps - len(rows))
        return rows, _NORM_SCALE.get(ns_coeffs, 1.0)
    try:
        if all(jnp.ndim(row) == 0 for row in ns_coeffs):
            ns_coeffs = [ns_coeffs] * steps
        rows = tuple(tuple(float(number) for number in row) for row in ns_coeffs)
    except TypeError as error:
        raise TypeError(
            f"ns_coeffs must be a preset's name ({', '.join(map(repr, COEFFS))}) or "
            f"rows of three Python numbers (a, b, c), got {ns_coeffs!r}"
        ) from error
    if any(len(row) != 3 or not all(map(math.isfinite, row)) for row in rows):
        raise ValueError(
            f"every row of ns_coeffs must be three finite numbers (a, b, c), "
            f"got {ns_coeffs!r}"
        )
    if len(rows) != steps:
        raise ValueError(
            f"ns_coeffs must have one row (a, b, c) for each of ns_steps={steps} "
            f"iterations, got {len(rows)}: give ns_steps={len(rows)}, or one (a, b, c)"
        )
    return rows, 1.0


def orthogonalize(
    x: jax.Array,
    *,
    table: Sequence[Row],
    norm_scale: float,
    eps: jax.typing.ArrayLike,
    method: str,
    combine: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Every matrix with its singular values taken to about 1, a zero matrix to zero.

    Args:
        x: bfloat16 or float32 `[..., r, c]`, in a team `[..., r, c/t]`.
        table: (a, b, c) of every iteration.
        norm_scale: factor on the Frobenius norm.
        eps: added to the scaled norm; may be traced.
        method: "direct" or "gram".
        combine: sums an array over the devices of a team; None without a team.

    Returns:
        `[..., r, c]` in the dtype of `x`.
    """
    combine = combine or (lambda partial: partial)
    iterate = {"direct": _direct, "gram": _gram}[method]
    scale, norm = _scale_and_norm(x, combine)
    denominator = norm_scale * norm + jnp.asarray(eps, jnp.float32) * scale
    denominator = jnp.where(denominator == 0, 1, denominator)
    return iterate(
        x * scale[..., None, None].astype(x.dtype),
        denominator[..., None, None],
        jnp.asarray(table, jnp.float32),
        combine,
    )


def _scale_and_norm(x, combine) -> tuple[jax.Array, jax.Array]:
    """A power of two `[...]` and the Frobenius norm `[...]` of `x` times it.

    Squares of 1e30 or 1e-30 leave float32. So the sum is taken under three scales at
    once, which costs one pass and one `combine`, and the one in range is kept.
    """
    wide = x.astype(jnp.float32)
    sums = [jnp.sum(jnp.square(wide * s), axis=(-2, -1)) for s in _SCALES]
    sums = combine(jnp.stack(sums, axis=-1))
    plain, small, large = sums[..., 0], sums[..., 1], sums[..., 2]
    pick = jnp.where(plain > 1e30, 1, jnp.where(plain < 1e-20, 2, 0))
    return jnp.asarray(_SCALES, jnp.float32)[pick], jnp.sqrt(
        jnp.where(pick == 0, plain, jnp.where(pick == 1, small, large))
    )


def _direct(x, denominator, table, combine) -> jax.Array:
    """X <- a X + (b A + c A A) X with A = X X^T, in the dtype of `x`, as published."""
    dtype = x.dtype

    def step(x, row):
        a, b, c = row
        gram = combine(_outer(x).astype(dtype))
        poly = (b * gram + c * _matmul(gram, gram)).astype(dtype)
        return (a * x + _matmul(poly, x)).astype(dtype), None

    x = (x.astype(jnp.float32) / denominator).astype(dtype)
    return lax.scan(step, x, table)[0]


def _gram(x, denominator, table, combine) -> jax.Array:
    """The same polynomials on A = X X^T alone: X is read at the start and the end.

    With Q = a I + b A + c A A an iteration is X <- Q X, A <- Q A Q. A and the product
    P of all Q are `float32[..., r, r]` whatever the dtype of `x`: in bfloat16 this
    iteration diverges. A team sums A once, in float32.
    """
    eye = jnp.eye(x.shape[-2], dtype=jnp.float32)
    eye = lax.broadcast(eye, x.shape[:-2])

    def polynomial(gram, row):
        a, b, c = row
        return a * eye + b * gram + c * _matmul(gram, gram)

    def step(carry, row):
        gram, factor, product = carry
        gram = _matmul(_matmul(factor, gram), factor)
        factor = polynomial(gram, row)
        return (gram, factor, _matmul(factor, product)), None

    gram = combine(_outer(x)) / denominator / denominator + _GRAM_SHIFT * eye
    factor = polynomial(gram, table[0])
    product = lax.scan(step, (gram, factor, factor), table[1:])[0][2] / denominator
    if x.dtype == jnp.float32:
        return _matmul(product, x)
    # P reaches 1000: rounded to bfloat16 it would drown the large singular vectors.
    # Two bfloat16 terms hold 16 bits of it, and X has only eight.
    high = lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)
    low = product - high
    result = _matmul(high.astype(x.dtype), x) + _matmul(low.astype(x.dtype), x)
    return result.astype(x.dtype)


def _matmul(x, y) -> jax.Array:
    """x y in float32: bfloat16 operands in one pass, float32 at full precision."""
    return jnp.matmul(
        x,
        y,
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _outer(x) -> jax.Array:
    """x x^T over the columns, in float32."""
    return _matmul(x, x.mT)


def ns_flops(r: int, c: int, *, steps: int, method: str, dtype, team: int = 1) -> float:
    """Operations per device to orthogonalize one whole `[r, c]` matrix.

    Two per multiply-add; a float32 product counts as the six bfloat16 passes that
    full precision takes on a TPU.
    """
    passes = 6 if dtype == jnp.float32 else 1
    long, short = 2.0 * r * r * c / team, 2.0 * r**3
    if method == "direct":
        return passes * steps * (2 * long + short)
    applied = 1 if dtype == jnp.float32 else 2
    return passes * (1 + applied) * long + 6 * (4 * steps - 3) * short


def cheaper_method(r: int, c: int, *, steps: int, dtype, team: int = 1) -> str:
    """ "direct" or "gram", by operations per device; "direct" on a tie."""
    direct, gram = (
        ns_flops(r, c, steps=steps, method=method, dtype=dtype, team=team)
        for method in ("direct", "gram")
    )
    return "gram" if gram < direct else "direct"
