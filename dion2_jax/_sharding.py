"""Where one leaf lies: the mesh, and the mesh axes that shard each of its axes.

Read from the array's type and the entry of `param_shardings`; array values never are.
"""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dion2_jax._arguments import shown

Names = tuple[str, ...]

TAKE_SHARDINGS = "pass param_shardings=dion2_jax.shardings_of(params)"


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


def counters_beside(params, state):
    """`state` with its scalars on all devices of `params`, where an init runs eagerly.

    On one device alone they would cost a second trace, and be refused by the next
    jitted step once a checkpoint is restored: then they are bound to that device.
    """
    leaves = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return state
    bound = [x.sharding for x in leaves if x.committed]
    meshes = [s.mesh for s in bound if isinstance(s, NamedSharding)]
    together = len({frozenset(s.device_set) for s in bound}) == 1
    if not together or len(meshes) < len(bound):
        return state
    everywhere = NamedSharding(meshes[0], PartitionSpec())

    def place(x):
        lone = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        return jax.device_put(x, everywhere) if lone and not x.ndim else x

    return jax.tree.map(place, state)


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
        f"jax.sharding.NamedSharding or PartitionSpec, got {shown(entry)}"
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
