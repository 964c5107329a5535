"""How one leaf lies: array type, given sharding and dimension numbers -> a Layout.

A leaf's axes fall in three groups: batch axes (each index its own matrix), the
reduction axes and the output axes. One of the two matrix groups is selected from.
Array values are never read here.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from dion2_jax._arguments import shown
from dion2_jax._sharding import Names, check_shards, describe_leaf, find_sharding

SELECT_AXES = ("sharded", "shorter", "output", "reduction")


@dataclass(frozen=True)
class Layout:
    """Where one leaf lies, and which slices of it are selected.

    shape: of the whole array. names: the mesh axes that shard each array axis.
    mesh: a Mesh or AbstractMesh, or None. batch, select, other: the array axes of the
    three groups. block: first index and size, along the output, of the matrix meant
    of a fused leaf; None where the leaf is not fused.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[Names, ...]
    mesh: Any
    batch: tuple[int, ...]
    select: tuple[int, ...]
    other: tuple[int, ...]
    select_is_output: bool
    block: tuple[int, int] | None = None

    @property
    def apart(self) -> bool:
        """Whether a block can be cut out of a device's shard by itself."""
        output = self.select if self.select_is_output else self.other
        return self.block is not None and not self.mesh_axes(output)

    @property
    def spec(self) -> PartitionSpec:
        """The partition of the whole array, one entry an axis."""
        return PartitionSpec(*(names or None for names in self.names))

    def mesh_axes(self, axes) -> Names:
        """Mesh axes longer than 1 that shard the given array axes."""
        names = (name for axis in axes for name in self.names[axis])
        return tuple(name for name in names if self.mesh.shape[name] > 1)

    def local_sizes(self, axes) -> tuple[int, ...]:
        """Sizes of the given array axes on one device."""
        return tuple(self.shape[axis] // shards(self, axis) for axis in axes)

    @property
    def replicas(self) -> Names:
        """Mesh axes longer than 1 that shard nothing of the leaf, in mesh order."""
        if self.mesh is None:
            return ()
        used = {name for names in self.names for name in names}
        shape = self.mesh.shape
        return tuple(a for a in shape if a not in used and shape[a] > 1)


def shards(layout: Layout, axis: int) -> int:
    """Number of shards of one array axis."""
    return math.prod(layout.mesh.shape[name] for name in layout.names[axis])


def resolve_layout(
    path: str, x, sharding, dimensions, splits, select_axis: str, *, neurons=False
) -> tuple[Layout, ...]:
    """The layout of leaf `x`; of a fused leaf one for every block.

    Args:
        path: of the leaf, for messages.
        x: an array, tracer or `ShapeDtypeStruct`.
        sharding: the entry of `param_shardings`, or None.
        dimensions: `MuonDimensionNumbers` of the leaf.
        splits: sizes of the blocks along the output, or None.
        select_axis: one of `SELECT_AXES`.
        neurons: normalized per neuron: only output slices can be selected.

    Raises:
        ValueError: the layout is unknown, contradictory or not supported.
    """
    shape = tuple(x.shape)
    reduction, output = matrix_axes(path, shape, dimensions)
    mesh, names = find_sharding(path, x, sharding)
    check_shards(path, shape, mesh, names)
    taken = {*reduction, *output}
    batch = tuple(a for a in range(len(shape)) if a not in taken)
    layout = Layout(path, shape, names, mesh, batch, output, reduction, True)
    blocks: list = [None]
    if splits is not None:
        check_splits(layout, splits)
    if splits is not None and len(splits) > 1:
        starts = itertools.accumulate((0, *splits[:-1]))
        blocks = [*zip(starts, splits, strict=True)]
    layouts = []
    for block in blocks:
        size = block[1] if block else math.prod(shape[a] for a in output)
        if select_output(layout, size, select_axis, neurons):
            layouts.append(replace(layout, block=block))
            continue
        if neurons:
            raise ValueError(
                f"{describe_leaf(path, shape, mesh)}: neuron_beta2 normalizes whole "
                f"neurons, so slices of the output axis must be selected, but "
                f"select_axis={select_axis!r} comes to the reduction axis: use "
                f"select_axis='output'"
            )
        layouts.append(
            replace(
                layout,
                select=reduction,
                other=output,
                select_is_output=False,
                block=block,
            )
        )
    return tuple(layouts)


def select_output(layout: Layout, size: int, select_axis: str, neurons: bool) -> bool:
    """Whether slices of the output axis are selected, else of the reduction axis.

    Args:
        layout: with the output axes as `select`.
        size: of the output, or of a block of it.
        select_axis, neurons: as in `resolve_layout`.
    """
    if select_axis in ("output", "reduction"):
        return select_axis == "output"
    shorter = size <= math.prod(layout.shape[a] for a in layout.other)
    if select_axis == "shorter":
        return shorter
    if neurons:
        return True
    output, reduction = (
        math.prod(shards(layout, a) for a in axes)
        for axes in (layout.select, layout.other)
    )
    return shorter if output == reduction else output > reduction


def check_splits(layout: Layout, splits: tuple[int, ...]) -> None:
    """Raises unless the blocks make up the output and every device can share them.

    Args:
        layout: with the output axes as `select`.
        splits: sizes of the blocks.
    """
    where = describe_leaf(layout.path, layout.shape, layout.mesh)
    for size in splits:
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"{where}: weight_splits {splits} must be positive ints, got "
                f"{shown(size)}"
            )
    sizes = [layout.shape[a] for a in layout.select]
    if sum(splits) != math.prod(sizes):
        raise ValueError(
            f"{where}: weight_splits {splits} must sum to its output size, "
            f"{math.prod(sizes)}, but sum to {sum(splits)}"
        )
    counts = [shards(layout, a) for a in layout.select]
    if math.prod(counts) == 1:
        return
    # Flat shards are contiguous only where no axis before the sharded one is longer.
    sharded = next(i for i, count in enumerate(counts) if count > 1)
    if math.prod(sizes[:sharded]) > 1 or math.prod(counts[sharded + 1 :]) > 1:
        raise ValueError(
            f"{where}: weight_splits {splits} of an output of axes {tuple(sizes)} can "
            f"be sharded along its first axis only, not as {tuple(counts)} shards: "
            f"replicate the others, or pass the blocks as separate parameters"
        )
    unit = counts[sharded] * math.prod(sizes[sharded + 1 :])
    if any(size % unit for size in splits):
        near = tuple(-(-size // unit) * unit for size in splits)
        raise ValueError(
            f"{where}: weight_splits {splits} cannot be sharded over "
            f"{counts[sharded]} devices: every block must be a multiple of {unit}, as "
            f"{near} would be; or replicate the output axis"
        )


def matrix_axes(path, shape, dimensions) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reduction and output axes as non-negative ints."""
    if not isinstance(dimensions, MuonDimensionNumbers):
        raise ValueError(
            f"{describe_leaf(path, shape)}: expected optax.contrib."
            f"MuonDimensionNumbers for a matrix, got {shown(dimensions)}. Name the "
            f"reduction and output axes in weight_dimension_numbers, or give the leaf "
            f"to another optimizer (dion2 gives it to AdamW)"
        )
    groups = []
    for given in dimensions:
        axes = given if isinstance(given, Sequence) else (given,)
        if any(
            isinstance(a, bool) or not isinstance(a, int | np.integer) for a in axes
        ):
            raise TypeError(
                f"{describe_leaf(path, shape)}: {dimensions} in "
                f"weight_dimension_numbers must be two axes or tuples of axes, each an "
                f"int, got {shown(given)}"
            )
        if any(not -len(shape) <= a < len(shape) for a in axes):
            raise ValueError(
                f"{describe_leaf(path, shape)}: {dimensions} names an axis that an "
                f"array of rank {len(shape)} does not have: in "
                f"weight_dimension_numbers use "
                + (
                    f"axes from {-len(shape)} to {len(shape) - 1}"
                    if shape
                    else "None for it: it is no matrix"
                )
            )
        groups.append(tuple(int(a) % len(shape) for a in axes))
    taken = groups[0] + groups[1]
    if not all(groups) or len(set(taken)) != len(taken):
        raise ValueError(
            f"{describe_leaf(path, shape)}: {dimensions} in weight_dimension_numbers "
            f"must name at least one reduction and one output axis, and no axis twice"
        )
    return groups[0], groups[1]


def check_placed(layout: Layout, x) -> None:
    """Raises if a parameter on one device is said to be sharded."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return
    if not isinstance(x.sharding, NamedSharding) and layout.mesh_axes(range(x.ndim)):
        raise ValueError(
            f"{describe_leaf(layout.path, layout.shape, layout.mesh)}: "
            f"param_shardings says {layout.spec}, but the array lies on one device: "
            f"place it first, jax.device_put(x, jax.sharding.NamedSharding(mesh, "
            f"{layout.spec}))"
        )
