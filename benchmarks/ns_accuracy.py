"""How far each Newton-Schulz method is from float64; prints the table of
docs/design.md: python benchmarks/ns_accuracy.py"""

import jax
import jax.numpy as jnp
import numpy as np

from dion2_jax._orthogonalize import newton_schulz_table, orthogonalize

SIZES = ((64, 512), (128, 128), (512, 2048))
CONDITIONS = (10**0.5, 1e2, 1e3, 1e5)
RUNS = tuple(
    (method, dtype)
    for dtype in (jnp.bfloat16, jnp.float32)
    for method in ("direct", "gram")
)


def matrices(r, c, seed=0):
    """float64[4, r, c], one for each condition, singular values log-spaced."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(r, r)))[0]
    right = np.linalg.qr(rng.normal(size=(c, r)))[0]
    return np.stack([(left * np.geomspace(1, 1 / k, r)) @ right.T for k in CONDITIONS])


def polynomial(x, table, norm_scale, eps):
    """The published iteration in float64, on every matrix of `[..., r, c]`."""
    x = np.asarray(x, np.float64)
    x = x / (norm_scale * np.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    for a, b, c in table:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def singular_values(x):
    """float64[..., r], ascending."""
    return np.sqrt(np.maximum(np.linalg.eigvalsh(x @ x.mT), 0))


def measure(r, c, steps=5):
    """By (method, dtype), for every condition: how far from float64 on one input.

    Returns:
        Two arrays `[4]`: the relative Frobenius distance, and the largest error of a
        singular value.
    """
    table, norm_scale = newton_schulz_table("polar_express", steps)
    result = {}
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jnp.asarray(matrices(r, c), dtype)
        exact = polynomial(x.astype(jnp.float32), table, norm_scale, 1e-8)
        for method in ("direct", "gram"):
            y = jax.jit(
                lambda x, method=method: orthogonalize(
                    x, table=table, norm_scale=norm_scale, eps=1e-8, method=method
                )
            )(x)
            y = np.asarray(y.astype(jnp.float32), np.float64)
            axes = (-2, -1)
            off = np.linalg.norm(y - exact, axis=axes)
            values = np.abs(singular_values(y) - singular_values(exact)).max(-1)
            result[method, dtype] = off / np.linalg.norm(exact, axis=axes), values
    return result


def main():
    names = [f"{method} {np.dtype(dtype)}" for method, dtype in RUNS]
    print("| size | condition |", " | ".join(names), "|")
    print("|---" * (2 + len(RUNS)) + "|")
    for r, c in SIZES:
        result = measure(r, c)
        for i, condition in enumerate(CONDITIONS):
            cells = [
                " / ".join(f"{error[i]:.1e}" for error in result[run]) for run in RUNS
            ]
            print(f"| {r} x {c} | {condition:.1e} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
