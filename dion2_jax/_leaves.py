"""Every leaf's layout from the arguments that are given per leaf."""

import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from dion2_jax._arguments import FLOATS, shown
from dion2_jax._layout import Layout, resolve_layout
from dion2_jax._matrices import matrix_dimension_numbers
from dion2_jax._sharding import describe_leaf
from dion2_jax._trees import Path, leaf_paths, name_of, resolve_entries


def is_dimensions(x) -> bool:
    """Whether `x` is one entry of `weight_dimension_numbers`."""
    return isinstance(x, MuonDimensionNumbers)


def is_array(x) -> bool:
    """Whether JAX takes `x` for an array, or for the shape and dtype of one."""
    try:
        return hasattr(x, "shape") and jax.typeof(x) is not None
    except (TypeError, ValueError):  # masked, of objects, or only looking like one
        return False


def check_values(paths: list[Path], leaves: list) -> None:
    """Raises if a parameter is the shape of an array only."""
    for path, x in zip(paths, leaves, strict=True):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"parameter {name_of(path)!r} is a ShapeDtypeStruct, without values: "
                f"give arrays, or call jax.eval_shape(tx.init, params)"
            )


def check_floating(paths: list[Path], leaves: list) -> None:
    """Raises unless every leaf is an array of real floating numbers."""
    for path, x in zip(paths, leaves, strict=True):
        if not is_array(x):
            raise TypeError(
                f"parameter {name_of(path)!r} is no array but {type(x).__name__}: "
                f"{shown(x)}. Leave it out with optax.masked, optax.partition or a "
                f"filter"
            )
        if not any(x.dtype == jnp.dtype(f) for f in FLOATS):
            raise TypeError(
                f"{describe_leaf(name_of(path), x.shape)} has dtype {x.dtype}; "
                f"expected one of {', '.join(jnp.dtype(f).name for f in FLOATS)}. "
                f"Leave it out with optax.masked or optax.partition"
            )


def is_sharding(x) -> bool:
    """Whether `x` is one entry of `param_shardings`."""
    return isinstance(x, NamedSharding | PartitionSpec)


def shardings_of(params):
    """The sharding of every leaf, for the argument `param_shardings`.

    Args:
        params: tree of arrays, or of `jax.ShapeDtypeStruct` with shardings. Call it
            outside of `jit`: a tracer on Auto axes does not know its sharding.

    Returns:
        The same tree of `jax.sharding.NamedSharding`, None for an array on one device
        or of NumPy, and for a `jax.ShapeDtypeStruct` that was made without a sharding,
        as by `jax.eval_shape` on Auto axes.

    Raises:
        ValueError: a leaf is sharded, but not by a NamedSharding.
        TypeError: a leaf is no array, or a tracer.

    Examples:
        >>> import jax.numpy as jnp
        >>> shardings_of({"w": jnp.zeros((2, 3))})
        {'w': None}
    """
    paths, leaves, treedef = leaf_paths(params)
    shardings: list[NamedSharding | None] = []
    for path, x in zip(paths, leaves, strict=True):
        if isinstance(x, np.ndarray):
            shardings.append(None)
            continue
        if isinstance(x, jax.core.Tracer) or not hasattr(x, "sharding"):
            raise TypeError(
                f"shardings_of needs arrays, got {type(x).__name__} for "
                f"{name_of(path)!r}: call it outside of jit, on the placed parameters"
            )
        sharding = x.sharding
        if not isinstance(sharding, NamedSharding):
            if sharding is not None and len(sharding.device_set) > 1:
                raise ValueError(
                    f"{describe_leaf(name_of(path), x.shape)}: lies on several devices "
                    f"by a {type(sharding).__name__}, which names no mesh axes: place "
                    f"it with a jax.sharding.NamedSharding"
                )
            sharding = None
        shardings.append(sharding)
    return jax.tree_util.tree_unflatten(treedef, shardings)


def gradients_of(updates, paths: list[Path], treedef) -> list:
    """The gradient of every leaf of a tree of these paths; None or masked as given."""
    try:
        return treedef.flatten_up_to(updates)
    except Exception as error:  # it prints what it found, which may fail
        found, _, _ = leaf_paths(updates)
        missing = [name_of(p) for p in paths if p not in found]
        extra = [name_of(p) for p in found if p not in paths]
        raise ValueError(
            f"the gradients are not a tree of the parameters' structure: missing "
            f"{missing[:5] or 'nothing'}, beyond it {extra[:5] or 'nothing'} ({error})"
        ) from error


def check_momenta(paths: list[Path], momenta: list, params, dtype) -> None:
    """Raises if the momentum of a state was made with another `mu_dtype`.

    Args:
        paths, momenta: of the state.
        params: that update got, or None.
        dtype: `mu_dtype`, or None: the parameters', where they are given.
    """
    known: dict = {}
    if dtype is None and params is not None:
        found, leaves, _ = leaf_paths(params)
        known = dict(zip(found, leaves, strict=True))
    for path, mu in zip(paths, momenta, strict=True):
        wanted = dtype or getattr(known.get(path), "dtype", mu.dtype)
        wanted = jax.dtypes.canonicalize_dtype(wanted)
        if mu.dtype != wanted:
            raise ValueError(
                f"{describe_leaf(name_of(path), mu.shape)}: its momentum is "
                f"{mu.dtype}, but mu_dtype={dtype} asks for {wanted}: give "
                f"mu_dtype={mu.dtype}, or convert the state by .astype, as Orbax does "
                f"where it restores into the state of a new init"
            )


def check_gradient(path: Path, like, gradient, what: str = "gradient") -> None:
    """Raises unless a gradient, or `what` it is, is of floats shaped like its leaf."""
    where = describe_leaf(name_of(path), like.shape)
    if not is_array(gradient) or isinstance(gradient, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{where}: its {what} is no array but {type(gradient).__name__}"
        )
    if tuple(gradient.shape) != tuple(like.shape):
        raise ValueError(f"{where}: its {what} has shape {tuple(gradient.shape)}")
    if not any(gradient.dtype == jnp.dtype(f) for f in FLOATS):
        raise TypeError(
            f"{where}: its {what} has dtype {gradient.dtype}, expected one of "
            f"{', '.join(jnp.dtype(f).name for f in FLOATS)}"
        )


def is_bool(x) -> bool:
    """Whether `x` is one entry of `weight_decay_mask`."""
    return isinstance(x, bool | np.bool_)


def is_splits(x) -> bool:
    """Whether `x` is one entry of `weight_splits`."""
    if not isinstance(x, tuple | list) or not x:
        return False
    return all(isinstance(i, numbers.Number) for i in x)


def resolve_layouts(
    tree,
    weight_dimension_numbers,
    weight_splits,
    param_shardings,
    select_axis: str,
    *,
    neurons: bool,
) -> list[tuple[Layout, ...]]:
    """The layouts of every leaf; arguments as in `scale_by_dion2`."""
    paths, leaves, _ = leaf_paths(tree)
    check_floating(paths, leaves)
    dimensions = resolve_entries(
        "weight_dimension_numbers",
        matrix_dimension_numbers
        if weight_dimension_numbers is None
        else weight_dimension_numbers,
        *(tree, is_dimensions),
    )
    shardings = resolve_entries("param_shardings", param_shardings, tree, is_sharding)
    splits = resolve_entries("weight_splits", weight_splits, tree, is_splits)
    layouts = []
    for path, x, sharding, axes, blocks in zip(
        paths, leaves, shardings, dimensions, splits, strict=True
    ):
        layouts.append(
            resolve_layout(
                *(name_of(path), x, sharding, axes),
                *(blocks and tuple(blocks), select_axis),
                neurons=neurons,
            )
        )
    return layouts
