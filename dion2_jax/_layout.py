"""How one leaf lies: array type, given sharding and dimension numbers -> a Layout.

A leaf's axes fall in three groups: batch axes (each index its own matrix), the
reduction axes and the output axes. One of the two matrix groups is selected from.
Array values are never read here.
"""

import itertools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

Names = tuple[str, ...]

SELECT_AXES = ("sharded", "shorter", "output", "reduction")
TAKE_SHARDINGS = "pass param_shardings=dion2_jax.shardings_of(params)"


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
    sizes = [layout.shape[a] for a in layout.select]
    if min(splits) < 1 or sum(splits) != math.prod(sizes):
        raise ValueError(
            f"{where}: weight_splits {splits} must be positive and sum to its output "
            f"size, {math.prod(sizes)}, but sum to {sum(splits)}"
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
            f"MuonDimensionNumbers for a matrix, got {dimensions!r}. Name the "
            f"reduction and output axes in weight_dimension_numbers, or give the leaf "
            f"to another optimizer (dion2 gives it to AdamW)"
        )
    groups = []
    for given in dimensions:
        axes = (given,) if isinstance(given, numbers.Integral) else given
        if not isinstance(axes, Sequence) or any(
            not isinstance(a, numbers.Integral) or isinstance(a, bool) for a in axes
        ):
            raise TypeError(
                f"{describe_leaf(path, shape)}: {dimensions} in "
                f"weight_dimension_numbers must be two axes or tuples of axes, each an "
                f"int, got {given!r}"
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


def find_sharding(path: str, x, entry) -> tuple:
    """The mesh (or None) and the mesh axes of every array axis."""
    rank = len(x.shape)
    typed = type_sharding(path, x)
    mesh = typed.mesh
    live = [a for a in mesh.axis_names if mesh.shape[a] > 1]
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(kinds[a] == AxisType.Manual for a in live):
        raise ValueError(
            f"{describe_leaf(path, x.shape, mesh)}: called inside a shard_map, where "
            f"only one shard is visible: call the optimizer outside of it"
        )
    explicit = [a for a in live if kinds[a] == AxisType.Explicit]
    names = spec_names(path, x.shape, mesh, typed.spec)
    if entry is None:
        if len(explicit) < len(live):
            raise ValueError(
                f"{describe_leaf(path, x.shape, mesh)}: its sharding over Auto mesh "
                f"axes cannot be read from its type. Pass "
                f"param_shardings=dion2_jax.shardings_of(params), or "
                f"param_shardings=jax.sharding.PartitionSpec() if it is replicated"
            )
        if mesh.empty:
            return None, ((),) * rank
        return concrete_mesh(x, mesh), names
    given_mesh, spec = entry_sharding(path, x, entry)
    given = spec_names(path, x.shape, given_mesh, spec)
    check_names(path, x.shape, given_mesh, given)
    difference = mesh_difference(typed, x, given_mesh)
    if difference:
        raise ValueError(
            f"{describe_leaf(path, x.shape, mesh)}: param_shardings gives it a "
            f"sharding on another mesh, {difference}: {TAKE_SHARDINGS}"
        )
    # On Explicit axes the type is the truth; on Auto axes only an array knows it.
    truth, known = names, explicit
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        if isinstance(x.sharding, NamedSharding) and len(explicit) < len(live):
            truth, known = spec_names(path, x.shape, mesh, x.sharding.spec), live
    if positions(truth, known) != positions(given, known):
        raise ValueError(
            f"{describe_leaf(path, x.shape, mesh)}: param_shardings says {spec}, but "
            f"the array is sharded as {getattr(x, 'sharding', typed).spec}: "
            f"{TAKE_SHARDINGS}"
        )
    # Where all axes are Explicit, shard_map compares axes of length 1 as well.
    whole = kinds and all(kind == AxisType.Explicit for kind in kinds.values())
    return given_mesh, names if whole else given


def mesh_difference(typed: NamedSharding, x, given) -> str:
    """How the mesh `given` differs from that of leaf `x`; "" if it does not."""
    mesh = typed.mesh
    if mesh.empty:
        return ""
    if tuple(mesh.shape.items()) != tuple(given.shape.items()):
        return str(dict(given.shape))
    if mesh.axis_types != given.axis_types:
        return f"with axis types {given.axis_types} instead of {mesh.axis_types}"
    own = getattr(getattr(x, "sharding", None), "mesh", None)
    if isinstance(own, Mesh) and isinstance(given, Mesh):
        if own.devices.tolist() != given.devices.tolist():
            return "of other devices, or in another order"
    return ""


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


def type_sharding(path: str, x) -> NamedSharding:
    """The sharding in the type of `x`: mesh and, on Explicit axes, the partition."""
    if isinstance(x, jax.ShapeDtypeStruct):
        if isinstance(x.sharding, NamedSharding):
            return x.sharding
        x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    elif isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        named = isinstance(x.sharding, NamedSharding)
        if not named and len(x.sharding.device_set) > 1:
            raise ValueError(
                f"{describe_leaf(path, x.shape)}: lies on several devices by a "
                f"{type(x.sharding).__name__}, which names no mesh axes: place it with "
                f"a jax.sharding.NamedSharding"
            )
    return jax.typeof(x).sharding


def concrete_mesh(x, mesh):
    """The mesh with devices where the array has one: eager calls need it."""
    if isinstance(x, jax.core.Tracer):
        return mesh
    return getattr(x.sharding, "mesh", mesh)


def entry_sharding(path: str, x, entry) -> tuple:
    """Mesh and PartitionSpec of one entry of `param_shardings`."""
    if isinstance(entry, NamedSharding):
        return entry.mesh, entry.spec
    if isinstance(entry, PartitionSpec):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                f"{describe_leaf(path, x.shape)}: param_shardings gives {entry} "
                f"without a mesh and none is set: use jax.set_mesh(mesh), or give "
                f"jax.sharding.NamedSharding(mesh, {entry})"
            )
        return mesh, entry
    raise ValueError(
        f"{describe_leaf(path, x.shape)}: an entry of param_shardings must be a "
        f"jax.sharding.NamedSharding or PartitionSpec, got {entry!r}"
    )


def spec_names(path: str, shape, mesh, spec) -> tuple[Names, ...]:
    """The partition with one tuple of mesh axes for every array axis."""
    entries = tuple(spec)
    if len(entries) > len(shape):
        raise ValueError(
            f"{describe_leaf(path, shape, mesh)}: the partition {spec} has "
            f"{len(entries)} entries for an array of rank {len(shape)}: "
            f"{TAKE_SHARDINGS}"
        )
    names = []
    for entry in entries:
        if entry is None or isinstance(entry, str):
            names.append((entry,) if entry else ())
        elif isinstance(entry, tuple):
            names.append(entry)
        else:
            raise ValueError(
                f"{describe_leaf(path, shape, mesh)}: the partition {spec} leaves an "
                f"axis open: say which mesh axes shard it, or None"
            )
    return (*names, *((),) * (len(shape) - len(entries)))


def positions(names: tuple[Names, ...], among) -> dict[str, tuple[int, int]]:
    """Array axis and order on it of every mesh axis in `among`, others left out."""
    kept = [[a for a in used if a in among] for used in names]
    return {a: (i, j) for i, used in enumerate(kept) for j, a in enumerate(used)}


def check_names(path: str, shape, mesh, names) -> None:
    """Raises unless the partition uses axes of the mesh, each at most once."""
    used = [a for axis in names for a in axis]
    unknown = [a for a in used if mesh is None or a not in mesh.shape]
    twice = sorted({a for a in used if used.count(a) > 1})
    if unknown or twice:
        what = f"no mesh axis {unknown[0]!r}" if unknown else f"{twice[0]!r} used twice"
        raise ValueError(
            f"{describe_leaf(path, shape, mesh)}: the partition {names} is not one of "
            f"this mesh: {what}: {TAKE_SHARDINGS}"
        )


def check_shards(path: str, shape, mesh, names) -> None:
    """Raises unless the mesh axes divide their array axes."""
    for size, axes in zip(shape, names, strict=True):
        count = math.prod(mesh.shape[a] for a in axes)
        if size % count:
            raise ValueError(
                f"{describe_leaf(path, shape, mesh)}: an axis of size {size} cannot be "
                f"sharded over {axes} in {count} equal shards: pad it to "
                f"{-(-size // count) * count}, or replicate it"
            )


def describe_leaf(path: str, shape, mesh=None) -> str:
    """How messages name a leaf."""
    where = "" if mesh is None or mesh.empty else f" on mesh {dict(mesh.shape)}"
    return f"parameter {path!r} of shape {tuple(shape)}{where}"
