"""The shape-dependent factor of the update, `adjust_lr` in the reference."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dion2_jax._layout import matrix_axes
from dion2_jax._trees import leaf_paths, name_of

ADJUST_LR = ("spectral_norm", "rms_norm", None)


def shape_factor(fan_in: int, fan_out: int, adjust_lr: str | None) -> float:
    """sqrt(fan_out / fan_in), 0.2 sqrt(max(fan_out, fan_in)), or 1."""
    if adjust_lr == "spectral_norm":
        return math.sqrt(fan_out / fan_in) if fan_in else 1.0
    if adjust_lr == "rms_norm":
        return 0.2 * math.sqrt(max(fan_out, fan_in))
    return 1.0


def scale_by_shape(
    known: Callable, adjust_lr: str | None, factor: float
) -> optax.GradientTransformation:
    """Scales every matrix by `factor` times its shape factor, from whole shapes.

    Args:
        known: updates -> for every leaf its `MuonDimensionNumbers`, the sizes of its
            blocks along the output or None, and more, as a list of tuples.
        adjust_lr: one of `ADJUST_LR`.
        factor: common to all matrices.
    """

    def update(updates, state, params=None):
        del params
        paths, leaves, treedef = leaf_paths(updates)
        scaled = []
        for path, x, (axes, splits, *_) in zip(
            paths, leaves, known(updates), strict=True
        ):
            reduction, output = matrix_axes(name_of(path), x.shape, axes)
            fan_in, fan_out = (
                math.prod(x.shape[a] for a in axes) for axes in (reduction, output)
            )
            sizes = splits or (fan_out,)
            scales = [factor * shape_factor(fan_in, n, adjust_lr) for n in sizes]
            if len(set(scales)) == 1:
                scale = jnp.asarray(scales[0], x.dtype)
            else:
                scale = along_output(np.repeat(scales, sizes), x, output)
            scaled.append(x * scale if any(s != 1 for s in scales) else x)
        return jax.tree_util.tree_unflatten(treedef, scaled), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def along_output(values: np.ndarray, x, output: tuple[int, ...]):
    """`values[flat output]` in the axes of x, size 1 along all but the output's."""
    values = values.reshape([x.shape[a] for a in output])
    values = values.transpose(sorted(range(len(output)), key=lambda i: output[i]))
    shape = [n if a in output else 1 for a, n in enumerate(x.shape)]
    return jnp.asarray(values.reshape(shape), x.dtype)
