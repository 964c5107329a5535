"""Checks of the arguments that are numbers or names: each error names its argument."""

import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = float(np.finfo(np.float32).max)
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)
ARRAYS = (jax.Array, np.ndarray, np.generic)


def shown(value) -> str:
    """How messages show any object: its repr, if it has one, and not all of it."""
    try:
        text = repr(value)
    except Exception:  # of whatever kind: Python refuses to print 10**5000
        return f"one of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def call(name: str, function, *args):
    """`function(*args)`, given as the argument `name`: its errors say so."""
    try:
        return function(*args)
    except (TypeError, ValueError) as error:
        if (getattr(function, "__module__", None) or "").startswith("dion2_jax."):
            raise  # it says what is wrong by itself
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(
            f"{name}: the given {shown(function)} raised {type(error).__name__}: "
            f"{error}"
        ) from error


def check_fraction(fraction, static_args: str) -> float:
    """`fraction` as a Python float in (0, 1]."""
    if isinstance(fraction, jax.Array | np.ndarray):
        raise TypeError(
            f"fraction fixes array shapes and must be a Python float, got "
            f"{type(fraction).__name__}: with optax.inject_hyperparams pass "
            f"static_args=dion2_jax.{static_args}"
        )
    if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real):
        raise TypeError(f"fraction must be a number in (0, 1], got {shown(fraction)}")
    try:
        number = float(fraction)
    except OverflowError:
        number = math.inf
    if not 0 < number <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {shown(fraction)}")
    return number


def check_choice(name: str, value, choices: tuple) -> None:
    """Raises unless `value` is one of `choices`."""
    if not any(value is c or (isinstance(value, str) and value == c) for c in choices):
        allowed = ", ".join(map(repr, choices))
        raise ValueError(f"{name} must be one of {allowed}, got {shown(value)}")


def check_number(name: str, value, *, optional=False, most=LARGEST, below=math.inf):
    """`value`, finite and from 0 to `most`, less than `below`; traced ones unread.

    Whole numbers and those of 8 bits become floats: JAX would not multiply by them.
    """
    if value is None and optional:
        return None
    scalar = check_scalar(name, value)
    if isinstance(value, jax.core.Tracer):
        return scalar
    number = value.item() if isinstance(value, ARRAYS) else scalar
    if not 0 <= number <= most or not number < below:
        end = f"{most:.4g}]" if below == math.inf else f"{below:.4g})"
        raise ValueError(f"{name} must lie in [0, {end}, got {shown(value)}")
    return scalar


def check_scalar(name: str, value):
    """`value`, a real number or an array of one, as floating numbers."""
    if isinstance(value, ARRAYS):
        real = jnp.issubdtype(value.dtype, jnp.number)
        if value.shape or not real or jnp.issubdtype(value.dtype, jnp.complexfloating):
            raise TypeError(
                f"{name} must be a real scalar, got an array {value.dtype}{value.shape}"
            )
        if any(value.dtype == jnp.dtype(f) for f in FLOATS):
            return value
        return jnp.asarray(value, jnp.float32)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_rate(name: str, value):
    """A number, or a schedule whose values are checked for being one."""
    if not callable(value):
        return check_number(name, value)
    return lambda count: check_scalar(name, call(name, value, count))


def check_int(name: str, value, low: int, below: float = math.inf) -> int:
    """`value` as an int of at least `low` and less than `below`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int of at least {low}, got {shown(value)}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {shown(value)}")
    if value >= below:
        raise ValueError(f"{name} must be less than {below}, got {shown(value)}")
    return int(value)


def check_bool(name: str, value) -> None:
    """Raises unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def check_dtype(name: str, value, allowed: tuple, *, optional=False):
    """`value` as a dtype out of `allowed`."""
    if value is None and optional:
        return None
    try:
        if isinstance(value, ARRAYS):
            raise TypeError("an array has a dtype, but is none")
        dtype = jnp.dtype(value)
    except Exception as error:  # NumPy asks an object for much, and takes all of it
        raise TypeError(f"{name} must be a dtype, got {shown(value)}") from error
    if dtype not in [jnp.dtype(a) for a in allowed]:
        names = ", ".join(jnp.dtype(a).name for a in allowed)
        raise ValueError(f"{name} must be one of {names}, got {dtype.name}")
    return dtype


def check_callable(name: str, value) -> None:
    """Raises unless `value` is None or callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be None or a function, got {shown(value)}")
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{name} must be hashable, for a compiled step is kept for it, but "
            f"{type(value).__name__} is not: pass lambda x: f(x)"
        ) from error
