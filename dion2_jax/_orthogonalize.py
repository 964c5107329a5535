"""Newton-Schulz: the orthogonal factor of a matrix by matrix products alone.

Matrices are `[..., r, c]`; the Gram matrix is formed over the rows, so the caller
makes the rows the short side. A team of devices may hold one matrix in blocks of
columns `[..., r, c/t]`: `combine` then sums over the team what runs over columns.
"""

import functools
import math
import numbers
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dion2_jax._arguments import LARGEST, check_int, shown
from dion2_jax._symmetric import computed, symmetric_product

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

# In the Gram iteration a rounding error of the Gram matrix grows with the square of
# the product of the coefficients a, until X is read again. 421 is what the first four
# of Polar Express make: all presets of five iterations start from X only once.
_GROWTH = 512.0

# Bytes of the matrices that are iterated on together. A v5e holds 128 MiB on the chip,
# for operands, results and float32 sums.
ON_CHIP = 16 * 2**20


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
    steps = check_int("ns_steps", ns_steps, 1, 1000)
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in COEFFS:
            raise ValueError(
                f"ns_coeffs must be one of {', '.join(map(repr, COEFFS))}, a table of "
                f"ns_steps rows (a, b, c), or one (a, b, c), got {shown(ns_coeffs)}"
            )
        rows = COEFFS[ns_coeffs]
        rows = rows[:steps] + rows[-1:] * (steps - len(rows))
        return rows, _NORM_SCALE.get(ns_coeffs, 1.0)
    if not isinstance(ns_coeffs, Sequence | np.ndarray):
        raise TypeError(
            f"ns_coeffs must be a preset's name or a sequence of rows (a, b, c), got "
            f"{shown(ns_coeffs)}"
        )
    try:
        single = all(isinstance(row, numbers.Real) for row in ns_coeffs)
        table = [
            tuple(map(float, row))
            for row in ([ns_coeffs] * steps if single else ns_coeffs)
        ]
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"ns_coeffs must be a preset's name ({', '.join(map(repr, COEFFS))}) or "
            f"rows of three Python numbers (a, b, c), got {shown(ns_coeffs)}"
        ) from error
    if any(len(row) != 3 or not all(abs(x) <= LARGEST for x in row) for row in table):
        raise ValueError(
            "every row of ns_coeffs must be three finite numbers (a, b, c), "
            f"got {shown(ns_coeffs)}"
        )
    if len(table) != steps:
        raise ValueError(
            f"ns_coeffs must have one row (a, b, c) for each of ns_steps={steps} "
            f"iterations, got {len(table)}: give ns_steps={len(table)}, or one row"
        )
    check_bounded(table)
    return tuple((a, b, c) for a, b, c in table), 1.0


def check_bounded(table: Sequence[tuple[float, ...]]) -> None:
    """Raises if the iterations take a singular value from [0, 1] out of all bounds."""
    values = np.linspace(0, 1, 101)
    for i, (a, b, c) in enumerate(table):
        values = a * values + b * values**3 + c * values**5
        if np.abs(values).max() > 1000:
            raise ValueError(
                f"the rows of ns_coeffs diverge: iteration {i + 1} of {len(table)} "
                f"takes a singular value that was at most 1 to "
                f"{np.abs(values).max():.3g}, though they should end near 1"
            )


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
    iterate = {"direct": _direct, "gram": _gram}[method]

    def some(x):
        scale, norm = _scale_and_norm(x, combine or (lambda partial: partial))
        denominator = norm_scale * norm + jnp.asarray(eps, jnp.float32) * scale
        denominator = jnp.where(denominator == 0, 1, denominator)[..., None, None]
        x = x * scale[..., None, None].astype(x.dtype)
        return iterate(x, denominator, table, combine)

    count, together = math.prod(x.shape[:-2]), at_once(x.shape, x.dtype)
    if together >= count:
        return some(x)
    flat = jnp.pad(
        x.reshape(count, *x.shape[-2:]), ((0, -count % together), (0, 0), (0, 0))
    )
    turns = lax.map(some, flat.reshape(-1, together, *x.shape[-2:]))
    return turns.reshape(flat.shape)[:count].reshape(x.shape)


def at_once(shape: tuple[int, ...], dtype) -> int:
    """How many of the matrices `[..., r, c]` are iterated on together.

    As many as stay on a chip between two products: more would be written to HBM and
    read again at every one. Fewer, down to 1 MiB, if the last turn then needs fewer
    zero matrices to be full: small ones of a prime number do not go one by one.
    """
    *batch, r, c = shape
    count = math.prod(batch)
    fit = max(1, ON_CHIP // max(1, r * c * dtype.itemsize))
    if count <= fit:
        return count
    return min(range(fit, (fit - 1) // 16, -1), key=lambda n: -count % n)


def _scale_and_norm(x, combine) -> tuple[jax.Array, jax.Array]:
    """A power of two `[...]`, and the Frobenius norm `[...]` of `x` times it.

    Squares of 1e30 and of 1e-30 leave float32. So the sum is taken under three scales
    at once, in one pass and one `combine`, and the first in range is kept: 1 for
    ordinary matrices, which are left as they are.
    """
    down, up = 2.0**-80, 2.0**80
    wide = x.astype(jnp.float32)
    # Bounded, because XLA may join the scales of a product to their square, 2**160.
    bounded = [jnp.minimum(jnp.abs(wide) * by, 2.0**63) for by in (1.0, down, up)]
    sums = [jnp.sum(jnp.square(part), axis=(-2, -1)) for part in bounded]
    plain, small, large = jnp.unstack(combine(jnp.stack(sums, axis=-1)), axis=-1)
    outside = [plain > 1e30, plain < 1e-20]
    scale = jnp.select(outside, [jnp.full_like(plain, by) for by in (down, up)], 1.0)
    return scale, jnp.sqrt(jnp.select(outside, [small, large], plain))


def _direct(x, denominator, table, combine) -> jax.Array:
    """X <- a X + (b A + c A A) X with A = X X^T, in the dtype of `x`, as published."""
    dtype = x.dtype

    def step(x, row):
        a, b, c = row
        gram = symmetric_product(_matmul, x, x.mT, combine, dtype)
        poly = (b * gram + c * symmetric_product(_matmul, gram, gram)).astype(dtype)
        return (a * x + _matmul(poly, x)).astype(dtype), None

    x = (x / denominator).astype(dtype)
    return lax.scan(step, x, jnp.asarray(table, jnp.float32))[0]


def _gram(x, denominator, table, combine) -> jax.Array:
    """The same polynomials on A = X X^T alone: X is read at the start and the end.

    With Q = a I + b A + c A A an iteration is X <- Q X, A <- Q A Q. Rounding makes some
    eigenvalues of A negative; they grow as small positive ones do, and once near -1
    the next iterations send them to infinity. In bfloat16 that happens at once. So A
    and the product P of all Q are float32, and long tables start again from X.
    """
    exact = x.dtype == jnp.float32
    # Their products are symmetric too, but halves of them made errors three times as
    # large: what does not commute by rounding then no longer averages out.
    product = _matmul if exact else _matmul_split
    eye = lax.broadcast(jnp.eye(x.shape[-2], dtype=jnp.float32), x.shape[:-2])

    def polynomial(gram, row):
        a, b, c = row
        return a * eye + b * gram + c * product(gram, gram)

    def step(carry, row):
        gram, factor, factors = carry
        gram = product(product(factor, gram), factor)
        factor = polynomial(gram, row)
        return (gram, factor, product(factor, factors)), None

    for segment in _segments(table):
        rows = jnp.asarray(segment, jnp.float32)
        gram = symmetric_product(_matmul, x, x.mT, combine) / denominator / denominator
        factor = polynomial(gram, rows[0])
        factors = lax.scan(step, (gram, factor, factor), rows[1:])[0][2] / denominator
        # P reaches 1000: rounded to bfloat16 it would drown the large singular vectors.
        if exact:
            x = _matmul(factors, x)
        else:
            high, low = _split(factors)
            x = (_matmul(high, x) + _matmul(low, x)).astype(x.dtype)
        denominator = jnp.ones_like(denominator)
    return x


def _segments(table) -> list[tuple[Row, ...]]:
    """The rows of `table` between which the Gram iteration starts again from X."""
    segments: list[tuple[Row, ...]] = []
    growth = 1.0
    for row in table:
        if not segments or growth > _GROWTH:
            segments.append(())
            growth = 1.0
        segments[-1] += (row,)
        growth *= max(1.0, abs(row[0]))
    return segments


def gram_restarts(table: Sequence[Row]) -> int:
    """How often "gram" reads X again in between: 0 for five iterations of a preset."""
    return len(_segments(table)) - 1


def _matmul(x, y) -> jax.Array:
    """x y in float32; float32 operands at full precision, six passes on a TPU."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, y, precision=precision, preferred_element_type=jnp.float32)


def _matmul_split(x, y) -> jax.Array:
    """x y of float32 matrices to 16 bits, in three bfloat16 passes.

    What `Precision.HIGH` is on a TPU; spelled out because on a GPU that is TF32, too
    coarse here, and on a CPU nothing.
    """
    (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
    left = jnp.concatenate([x_high, x_high, x_low], axis=-1)
    return _matmul(left, jnp.concatenate([y_high, y_low, y_high], axis=-2))


def _split(x) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 matrices whose sum is the float32 `x` to 16 bits."""
    # Not a cast there and back, which XLA may drop as excess precision.
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def ns_flops(
    r: int, c: int, *, steps: int, method: str, dtype, team: int = 1, restarts: int = 0
) -> float:
    """Operations per device to orthogonalize one whole `[r, c]` matrix.

    Two per multiply-add, times the bfloat16 passes of the product. `restarts` matters
    to "gram" alone.
    """
    exact = dtype == jnp.float32
    half = computed(r)
    long, short = 2.0 * r * r * c / team, 2.0 * r**3
    if method == "direct":
        return (6 if exact else 1) * steps * ((1 + half) * long + half * short)
    segments = 1 + restarts
    # A = X X^T in one pass, P X in two; at full precision six each.
    return (
        segments * (6 * (1 + half) if exact else half + 2) * long
        + (4 * steps - 3 * segments) * (6 if exact else 3) * short
    )


def cheaper_method(
    r: int, c: int, *, steps: int, dtype, team: int = 1, restarts: int = 0
) -> str:
    """ "direct" or "gram", by operations per device; "direct" on a tie.

    In float32 always "direct": "gram" squares the condition number there, and is
    less accurate.
    """
    if dtype == jnp.float32:
        return "direct"
    cost = functools.partial(
        ns_flops, r, c, steps=steps, dtype=dtype, team=team, restarts=restarts
    )
    return "gram" if cost(method="gram") < cost(method="direct") else "direct"
