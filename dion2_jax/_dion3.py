"""dion3: dion2 with neurons normalized."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dion2_jax import _arguments as check
from dion2_jax._alias import dion2


def dion3(
    learning_rate: optax.ScalarOrSchedule,
    fraction: float = 0.25,
    ef_decay: jax.typing.ArrayLike = 0.95,
    *,
    selection: str = "local",
    select_axis: str = "sharded",
    score: str = "l1",
    seed: int = 0,
    ns_coeffs="polar_express",
    ns_steps: int = 5,
    ns_method: str = "direct",
    ns_dtype=jnp.bfloat16,
    newton_schulz_fn: Callable[[jax.Array], jax.Array] | None = None,
    eps: jax.typing.ArrayLike = 1e-8,
    mu_dtype=None,
    neuron_beta2: jax.typing.ArrayLike = 0.95,
    weight_dimension_numbers=None,
    weight_splits=None,
    param_shardings=None,
    share_replicas: bool = True,
    max_exchange_bytes: int = 256 * 2**20,
    adjust_lr: str | None = "spectral_norm",
    adjust_fraction: bool = False,
    weight_decay: jax.typing.ArrayLike = 0.01,
    weight_decay_mask=None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike = 0.01,
) -> optax.GradientTransformationExtraArgs:
    """Dion3, also called NorDion2: Dion2 with the update normalized per neuron.

    The arguments are those of `dion2`, but `neuron_beta2`, the decay of the second
    moment of every neuron's update, is a number. Slices of the output axis are
    selected: whole neurons.

    Returns:
        An `optax.GradientTransformationExtraArgs`.

    Raises:
        ValueError, TypeError: as in `dion2`; `neuron_beta2` is None.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> params = {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}
        >>> tx = dion3(1e-2)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> jax.tree.map(jnp.shape, optax.apply_updates(params, updates))
        {'bias': (6,), 'kernel': (4, 6)}

    References:
        Dion3: Full-Stack Orthogonal Updates, 2026, https://arxiv.org/abs/2608.11612; in
        the reference implementation NorDion2, https://github.com/microsoft/dion.
    """
    arguments = dict(locals())
    check.check_number("neuron_beta2", neuron_beta2, most=1.0)
    return dion2(**arguments)
