"""NorDion2's rescaling of every selected neuron by its second moment (spec of Dion3).

Only numbers per neuron are needed: the rescaled update is the update times one factor
a neuron, and both Frobenius norms follow from the mean squares.
"""

import jax.numpy as jnp
from jax import lax

_FLOOR = 1e-8  # a constant of the method, not the optimizer's eps


def neuron_factors(mean_square, nu, sets, beta2, axes):
    """The factor of every selected neuron, and its new second moment.

    Args:
        mean_square: float32[N, k], mean of the squared update over whole neurons.
        nu: float32[N, k], second moments of the selected neurons.
        sets: bool[N, k, s], of which of s sets every neuron is, each of which keeps its
            norm; of none if it was not selected.
        beta2: decay of the second moment.
        axes: mesh axes over which the two Frobenius norms are summed.

    Returns:
        float32[N, k] factors and float32[N, k] second moments.
    """
    nu = nu + (1 - beta2) * (mean_square - nu)
    divisor = jnp.sqrt(nu) + _FLOOR
    squares = jnp.stack([mean_square, mean_square / jnp.square(divisor)], axis=-1)
    total = jnp.sum(jnp.where(sets[..., None], squares[:, :, None], 0), axis=1)
    if axes:
        total = lax.psum(total, axes)
    before, after = jnp.unstack(jnp.sqrt(total), axis=-1)
    ratio = (before / jnp.maximum(after, _FLOOR))[:, None]
    return jnp.sum(jnp.where(sets, ratio, 0), axis=-1) / divisor, nu
