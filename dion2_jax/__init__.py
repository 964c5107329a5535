"""Dion2: a sharded matrix optimizer for JAX, as Optax gradient transformations."""

from dion2_jax._alias import STATIC_ARGS, dion2
from dion2_jax._dion3 import dion3
from dion2_jax._leaves import shardings_of
from dion2_jax._matrices import matrix_dimension_numbers
from dion2_jax._transform import (
    SCALE_BY_DION2_STATIC_ARGS,
    ScaleByDion2State,
    scale_by_dion2,
)
from dion2_jax.describe import describe
from dion2_jax.stats import stats

__version__ = "0.1.0"

__all__ = [
    "SCALE_BY_DION2_STATIC_ARGS",
    "STATIC_ARGS",
    "ScaleByDion2State",
    "describe",
    "dion2",
    "dion3",
    "matrix_dimension_numbers",
    "scale_by_dion2",
    "shardings_of",
    "stats",
]
