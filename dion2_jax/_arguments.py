"""Checks of the arguments that are numbers or names: each error names its argument."""

import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = float(np.finfo(np.float64).max)


def check_fraction(fraction, static_args: str) -> float:
    """`fraction` as a Python float in (0, 1]."""
    if isinstance(fraction, jax.Array | np.ndarray):
        raise TypeError(
            f"fraction fixes array shapes and must be a Python float, got "
            f"{type(fraction).__name__}: with optax.inject_hyperparams pass "
            f"static_args=dion2_jax.{static_args}"
        )
    if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real):
        raise TypeError(f"fraction must be a number in (0, 1], got {fraction!r}")
    try:
        number = float(fraction)
    except OverflowError:
        number = math.inf
    if not 0 < number <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction!r}")
    return number


def check_choice(name: str, value, choices: tuple) -> None:
    """Raises unless `value` is one of `choices`."""
    if not any(value is c or (isinstance(value, str) and value == c) for c in choices):
        allowed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def check_number(name: str, value, low=0.0, *, optional=False, high=math.inf) -> None:
    """Raises unless `value` is finite, in [low, high]; traced ones are not read."""
    if value is None and optional:
        return
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.number):
            raise TypeError(
                f"{name} must be a scalar, got an array {value.dtype}{value.shape}"
            )
        if isinstance(value, jax.core.Tracer):
            return
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high or value > LARGEST:
        end = "inf)" if high == math.inf else f"{high}]"
        raise ValueError(f"{name} must lie in [{low}, {end}, got {value!r}")


def check_int(name: str, value, low: int, below: float = math.inf) -> int:
    """`value` as an int of at least `low` and less than `below`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int of at least {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value!r}")
    if value >= below:
        raise ValueError(f"{name} must be less than {below}, got {value!r}")
    return int(value)


def check_bool(name: str, value) -> None:
    """Raises unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_dtype(name: str, value, allowed: tuple, *, optional=False):
    """`value` as a dtype out of `allowed`."""
    if value is None and optional:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a dtype, got {value!r}") from error
    if dtype not in [jnp.dtype(a) for a in allowed]:
        names = ", ".join(jnp.dtype(a).name for a in allowed)
        raise ValueError(f"{name} must be one of {names}, got {dtype.name}")
    return dtype


def check_callable(name: str, value) -> None:
    """Raises unless `value` is None or callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be None or a function, got {value!r}")
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{name} must be hashable, for a compiled step is kept for it, but "
            f"{type(value).__name__} is not: pass lambda x: f(x)"
        ) from error
