"""The device mesh (dp, fsdp, tp), and how arrays are placed on it.

Axis types are the two ways JAX shards: on Auto axes the compiler chooses layouts and
the program gives hints; on Explicit axes the layout is part of an array's type.
`place`, `einsum` and `take_rows` say the same layout in either language.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from lm.errors import UserError

AXES = ("dp", "fsdp", "tp")
BATCH = ("dp", "fsdp")  # the mesh axes over which the sequences of a batch are divided


def mesh_sizes(devices: int, dp, fsdp, tp) -> tuple[int, int, int]:
    """Sizes of (dp, fsdp, tp) whose product is `devices`; a None is filled in.

    Raises:
        UserError: no sizes with those given multiply to the device count.
    """
    flags = {"--dp": dp, "--fsdp": fsdp, "--tp": tp}
    given = {flag: size for flag, size in flags.items() if size is not None}
    product = math.prod(given.values())
    said = " x ".join(f"{flag} {size}" for flag, size in given.items())
    said += f" = {product}" if len(given) > 1 else ""
    if dp and fsdp and product != devices:
        raise UserError(
            f"{said} devices, but there are {devices}: give sizes whose product is "
            f"{devices}, or another --devices"
        )
    if devices % product:
        raise UserError(
            f"{said} does not divide the {devices} devices: give sizes whose product "
            f"divides {devices}, or another --devices"
        )
    left = devices // product
    if fsdp is None:
        return dp or 1, left, tp or 1
    return dp or left, fsdp, tp or 1


def make_mesh(dp: int, fsdp: int, tp: int, axis_types: str) -> Mesh:
    """A mesh of dp x fsdp x tp devices, all its axes "auto" or all "explicit"."""
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[axis_types]
    return jax.make_mesh((dp, fsdp, tp), AXES, axis_types=(kind,) * 3)


def _explicit() -> bool:
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return bool(kinds) and all(kind == AxisType.Explicit for kind in kinds)


def place(x: jax.Array, spec: P) -> jax.Array:
    """x laid out as `spec` on the mesh of the context (inside jit)."""
    if _explicit():
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)


def einsum(equation: str, x: jax.Array, y: jax.Array, spec: P) -> jax.Array:
    """jnp.einsum laid out as `spec`: sums over a sharded axis are all-reduced."""
    if _explicit():
        return jnp.einsum(equation, x, y, out_sharding=spec)
    return jax.lax.with_sharding_constraint(jnp.einsum(equation, x, y), spec)


def take_rows(table: jax.Array, rows: jax.Array, spec: P) -> jax.Array:
    """table[rows], laid out as `spec`."""
    if _explicit():
        return table.at[rows].get(out_sharding=spec)
    return jax.lax.with_sharding_constraint(table[rows], spec)


def gathered(spec: P) -> P:
    """`spec` without fsdp: what a weight looks like while it is used."""
    return P(*(None if axis == "fsdp" else axis for axis in spec))
