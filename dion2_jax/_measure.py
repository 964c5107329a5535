"""What one step selects, measured, for the leaves of one mesh, inside shard_map.

Of every slice only its norm and whether it is selected are gathered; whole matrices are
read where they lie.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dion2_jax._groups import Group
from dion2_jax._layout import Layout
from dion2_jax._options import Options
from dion2_jax._plan import Plan
from dion2_jax._ranking import (
    Selected,
    by_member,
    member_scores,
    own_columns,
    own_slices,
    select_group,
)
from dion2_jax._selection import combine_scores
from dion2_jax._sharding import Names
from dion2_jax._views import matrices_of

QUANTILES = dict(min=0.0, p10=0.1, p25=0.25, p50=0.5, p75=0.75, p90=0.9, max=1.0)


class Leaf(NamedTuple):
    """The shard of one leaf, or how it is partitioned.

    momentum: before the gradient. update: or None. waits: of every block int32[M, n],
    or None: not counted.
    """

    gradient: Any
    momentum: Any
    parameter: Any
    update: Any
    waits: Any


class Part(NamedTuple):
    """What is known of M matrices of n slices, the same on every device.

    norms: float32[M, n], L1. selected: bool[M, n]. waited: int32[M, n], steps since
    a slice was selected last, this one counted, or None. sums: float32[M, 3], squares
    of the update's norm, of the parameter's, and of the orthogonality error; or None.
    """

    norms: Any
    selected: Any
    waited: Any
    sums: Any


def measure_plan(plan: Plan, options: Options, positions, leaves: list[Leaf], count):
    """Reports of every leaf and of every group, and the waits of every leaf.

    Args:
        plan, options: of the step.
        positions: of every leaf in its tree.
        leaves: their shards.
        count: int32[], the step.

    Returns:
        For every leaf, and for every group, a dict of float32[], as `stats` says, empty
        for a leaf without elements; for every leaf its new waits, or None.
    """
    momenta = [x.momentum + x.gradient.astype(x.momentum.dtype) for x in leaves]
    momenta = _after([x.update for x in leaves], momenta)
    ranks: dict[int, jax.Array] = {}
    selected = [
        select_group(plan, g, options, momenta, positions, count, ranks)
        for g in range(len(plan.groups))
    ]
    l1 = dataclasses.replace(options, score="l1")
    of_leaf: list[list] = [[] for _ in leaves]
    of_group: list[list] = [[] for _ in plan.groups]
    new = [x.waits and list(x.waits) for x in leaves]
    for g, (group, chosen) in enumerate(zip(plan.groups, selected, strict=True)):
        scores = [
            member_scores(plan.layout(m), group, m, momenta[m.leaf], l1, None, None)
            for m in group.members
        ]
        norms = combine_scores(jnp.concatenate(scores), group.other_mesh, "l1")
        sums = None
        if all(leaves[m.leaf].update is not None for m in group.members):
            sums = _sums(plan, group, chosen, leaves, jax.random.key(count))
        for m, whole, mask, numbers in _whole(plan, group, norms, chosen.mask, sums):
            waited, waits = None, new[m.leaf]
            if waits is not None:
                waited = waits[m.block] + 1
                waits[m.block] = jnp.where(mask, 0, waited)
            part = Part(whole, mask, waited, numbers)
            of_leaf[m.leaf].append(part)
            of_group[g].append(part)
    return (
        reports(of_leaf),
        [report(parts) for parts in of_group],
        [waits and tuple(waits) for waits in new],
    )


def _after(updates, momenta) -> list[jax.Array]:
    """The momenta, not to be had before the updates.

    Else a CPU that plays many devices may run collectives of the step, if that is in a
    `lax.cond` (`optax.apply_if_finite`), and of this in any order, and wait forever.
    """
    never = [  # no number is zero and NaN: XLA does not know
        (first == 0) & jnp.isnan(first)
        for first in (x[(0,) * x.ndim] for x in updates if x is not None and x.size)
    ]
    if not never:
        return momenta
    return [jnp.where(jnp.any(jnp.stack(never)), 0, mu) for mu in momenta]


def reports(leaves: list[list[Part]]) -> list[dict[str, jax.Array]]:
    """The report of every leaf; those of the same shapes are computed together."""
    alike: dict = {}
    for i, parts in enumerate(leaves):
        if parts:
            shapes = tuple(p.norms.shape for p in parts)
            alike.setdefault((shapes, jax.tree.structure(parts)), []).append(i)
    found: list[dict] = [{} for _ in leaves]
    for at in alike.values():
        parts = jax.tree.map(lambda *x: jnp.stack(x), *(leaves[i] for i in at))
        numbers = jax.vmap(report)(parts)
        for n, i in enumerate(at):
            found[i] = {name: x[n] for name, x in numbers.items()}
    return found


def report(parts: list[Part]) -> dict[str, jax.Array]:
    """The numbers that `stats` returns for all these matrices together."""
    total = lambda arrays: jnp.sum(jnp.stack([jnp.sum(x) for x in arrays]))  # noqa: E731
    mass = total(p.norms for p in parts)
    taken = total(jnp.where(p.selected, p.norms, 0) for p in parts)
    means = [jnp.mean(p.norms, axis=1, keepdims=True) for p in parts]
    relative = [
        (p.norms / jnp.where(mean == 0, 1, mean)).reshape(-1)
        for p, mean in zip(parts, means, strict=True)
    ]
    levels = jnp.asarray(list(QUANTILES.values()), jnp.float32)
    quantiles = jnp.quantile(jnp.concatenate(relative), levels)
    found = {"selected_mass": taken / jnp.where(mass == 0, 1, mass)}
    found |= {f"norm_{q}": quantiles[i] for i, q in enumerate(QUANTILES)}
    if all(p.waited is not None for p in parts):
        # In float32: sums of int32 overflow, and with x64 quotients are float64.
        waited = total(
            jnp.where(p.selected, p.waited, 0).astype(jnp.float32) for p in parts
        )
        found["wait_mean"] = waited / total(p.selected for p in parts)
        longest = jnp.max(jnp.stack([jnp.max(p.waited) for p in parts]))
        found["wait_max"] = longest.astype(jnp.float32)
    if all(p.sums is not None for p in parts):
        update, parameter, error = (
            jnp.concatenate([p.sums[:, i] for p in parts]) for i in range(3)
        )
        found["orthogonality_error"] = jnp.sqrt(jnp.mean(error))
        norm = jnp.sqrt(jnp.sum(parameter))
        found["update_to_parameter"] = jnp.sqrt(jnp.sum(update)) / norm
    return found


def _whole(plan: Plan, group: Group, norms, mask, sums):
    """Of every member norms and mask `[M, n]` and sums `[M, 3]`, of all devices.

    Matrices and slices are in the order of the leaf, on every mesh: waits outlive one.

    Args:
        plan, group: of the mesh, and the group.
        norms, mask: `[N, n_local]`.
        sums: `[N, 3]`, or None.
    """
    slices = jnp.where(mask, -norms, norms)  # one array travels: the sign is the mask
    if group.select_mesh:
        slices = lax.all_gather(slices, group.select_mesh, axis=1, tiled=True)
    layout = plan.layout(group.members[0])
    here = {*group.select_mesh, *group.other_mesh, *layout.replicas}
    shape = layout.mesh.shape if layout.mesh else {}
    batch = tuple(a for a in shape if shape[a] > 1 and a not in here)
    if batch:
        slices, sums = (
            jax.tree.map(lambda x: lax.all_gather(x, batch, axis=1), x)
            for x in (slices, sums)
        )
    for m, own, numbers in by_member(group, slices, sums):
        start = group.first(m)
        own = _in_order(own, plan.layout(m), batch)[:, start : start + group.n]
        numbers = None if numbers is None else numbers.reshape(-1, 3)
        yield m, abs(own), jnp.signbit(own), numbers


def _in_order(x, layout: Layout, batch: Names) -> jax.Array:
    """`[M, n]`, ordered as the leaf, from what every device has, device after device.

    Args:
        x: `[M_local, D, n]`, the slices shard after shard; without `batch` no D.
        batch: mesh axes of D devices, among which the matrices are dealt out.
    """
    local = layout.local_sizes(layout.batch)
    x = x.reshape(*local, *(layout.mesh.shape[a] for a in batch), x.shape[-1])
    order = []
    for i, axis in enumerate(layout.batch):
        names = [a for a in layout.names[axis] if a in batch]
        order += [*(len(local) + batch.index(a) for a in names), i]
    x = x.transpose(*order, x.ndim - 1).reshape(-1, x.shape[-1])
    if layout.block and layout.select_is_output:
        return x  # shards of the output follow each other, or there are none
    parts = layout.local_sizes(layout.select)
    counts = (
        layout.shape[a] // size for a, size in zip(layout.select, parts, strict=True)
    )
    x = x.reshape(len(x), *counts, *parts)
    k = len(parts)
    order = [j for i in range(1, k + 1) for j in (i, k + i)]
    return x.transpose(0, *order).reshape(len(x), -1)


def _sums(
    plan: Plan, group: Group, chosen: Selected, leaves: list[Leaf], key
) -> jax.Array:
    """float32[N, 3]: of every matrix, as `Part.sums`."""
    updates, parameters, columns = [], [], []
    for m in group.members:
        own = own_columns(group, m)
        part = lambda x: jnp.where(  # noqa: E731
            own_slices(group, m)[:, :, None] & own,  # noqa: B023
            matrices_of(x, plan.layout(m)).astype(jnp.float32),  # noqa: B023
            0,
        )
        updates.append(part(leaves[m.leaf].update))
        parameters.append(part(leaves[m.leaf].parameter))
        columns.append(jnp.broadcast_to(own[:, 0], (m.count, group.c_local)))
    update, parameter = jnp.concatenate(updates), jnp.concatenate(parameters)
    u = jnp.where(chosen.mask[:, :, None], update, 0)
    squares = jnp.stack(
        [jnp.sum(jnp.square(x), axis=(1, 2)) for x in (update, parameter, u)], axis=1
    )
    squares = _psum(squares, group.select_mesh + group.other_mesh)
    rows, meshes = chosen.mask, (group.select_mesh, group.other_mesh)
    if group.splits_rows():
        u, rows, meshes = u.mT, jnp.concatenate(columns), meshes[::-1]
    error = _error(key, u, rows, min(group.shape), squares[:, 2], *meshes)
    return jnp.stack([squares[:, 0], squares[:, 1], error], axis=1)


def _error(
    key, u, rows, r: int, squares, row_mesh: Names, column_mesh: Names
) -> jax.Array:
    """float32[N]: |U U^T / s - 1|_F^2 / r with s = |U|_F^2 / r, by one random vector.

    Of random signs v the square of (U U^T / s - 1) v has that mean (Hutchinson), and
    needs vectors alone.

    Args:
        key: of the vectors, another at every step, so that what they miss averages out.
        u: float32[N, r_local, c_local], zero in other rows than the r that count.
        rows: bool[N, r_local], those.
        squares: float32[N], of u's norms.
        row_mesh, column_mesh: mesh axes that shard u.
    """
    if row_mesh:
        key = jax.random.fold_in(key, lax.axis_index(row_mesh))
    signs = jax.random.rademacher(key, rows.shape, jnp.float32)
    v = jnp.where(rows, signs, 0)
    product = lambda equation, x: jnp.einsum(  # noqa: E731
        equation, u, x, precision=lax.Precision.HIGHEST
    )
    w = _psum(product("nrc,nr->nc", v), row_mesh)
    w = _psum(product("nrc,nc->nr", w), column_mesh)
    scale = jnp.where(squares == 0, 1, squares / r)
    away = w / scale[:, None] - v
    return _psum(jnp.sum(jnp.square(away), axis=1), row_mesh) / r


def _psum(x, axes: Names):
    return lax.psum(x, axes) if axes else x
