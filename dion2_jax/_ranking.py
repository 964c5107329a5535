"""Which slices of a group's matrices are selected, on this device and by the owners."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from dion2_jax._groups import Group, Member
from dion2_jax._layout import Layout
from dion2_jax._options import Options
from dion2_jax._plan import Plan
from dion2_jax._selection import (
    ascending,
    combine_scores,
    one_hot,
    random_scores,
    slice_scores,
    top_slices,
)
from dion2_jax._views import cut_out, matrices_of


@dataclass(frozen=True)
class Selected:
    """Selected slices of one group.

    index: int32[N, k] on this device, or None if all its slices are selected; valid:
    bool[N, k], or None if all are; mask: bool[N, n/p]. rows: int32[N, K], where an
    owner finds the K selected slices among those sent, or None if it gets no others.
    """

    index: jax.Array | None
    valid: jax.Array | None
    mask: jax.Array
    rows: jax.Array | None


def select_group(
    plan: Plan, g: int, options: Options, momenta, positions, count, ranks: dict
) -> Selected:
    """The selected slices of one group.

    Args:
        plan, g: of the step, and which of its groups.
        options: static arguments.
        momenta: of every leaf of the group, the gradient added, its shard.
        positions: of every leaf in its tree.
        count: int32[], the step.
        ranks: of the groups before, by their number; this one's are added.
    """
    group = plan.groups[g]
    if group.takes_all:
        return select(group, None)
    if plan.ranking(g) == g:
        scores = [
            member_scores(
                *(plan.layout(m), group, m, momenta[m.leaf], options),
                *(count, positions[m.leaf]),
            )
            for m in group.ranked
        ]
        ranks[g] = rank(group, jnp.concatenate(scores), options)
    return select(group, ranks[plan.ranking(g)])


def by_member(group: Group, *arrays):
    """The members of a group, each with its part of the arrays `[N, ...]`."""
    first = 0
    for member in group.members:
        part = lambda x: x[first : first + member.count]  # noqa: E731, B023
        yield (member, *(jax.tree.map(part, a) for a in arrays))
        first += member.count


def own_columns(group: Group, member: Member) -> jax.Array:
    """bool[1, 1, c_local]: which columns on this device are the member's own."""
    column = lax.broadcasted_iota(jnp.int32, (1, 1, group.c_local), 2)
    if not group.cut:
        return column >= 0
    column += lax.axis_index(group.other_mesh) * group.c_local
    return (column >= member.start) & (column < member.start + group.c)


def own_slices(group: Group, member: Member) -> jax.Array:
    """bool[1, n_local]: which slices on this device are the member's own."""
    place = lax.broadcasted_iota(jnp.int32, (1, group.n_local), 1)
    if not group.fused:
        return place >= 0
    place += lax.axis_index(group.select_mesh) * group.n_local
    return (place >= member.start) & (place < member.start + group.n)


def member_scores(
    layout: Layout, group, member, momentum, options: Options, count, leaf
):
    """float32[N, n_local]: of one member's slices, as far as this device sees them."""
    kept = layout.batch + layout.select
    n = math.prod(layout.local_sizes(layout.select))
    if options.score == "random":
        whole = tuple(layout.shape[a] for a in kept)
        # Blocks cut out of the output share its numbers.
        block = 0 if layout.select_is_output else member.block
        scores = random_scores(options.seed, count, (leaf, block), whole)
        starts = [
            lax.axis_index(names) * size if (names := layout.names[a]) else 0
            for a, size in zip(kept, layout.local_sizes(kept), strict=True)
        ]
        scores = lax.dynamic_slice(scores, starts, layout.local_sizes(kept))
    elif layout.block is None or layout.select_is_output:
        scores = slice_scores(momentum, layout.other, options.score)
        order = sorted(kept)
        scores = scores.transpose([order.index(a) for a in kept])
    else:
        own = matrices_of(momentum, layout)
        if group.cut:
            own = jnp.where(own_columns(group, member), own, 0)
        return slice_scores(own, (2,), options.score)
    scores = scores.reshape(-1, n)
    return cut_out(scores, layout, axis=1) if layout.select_is_output else scores


def rank(group: Group, scores, options: Options) -> jax.Array:
    """What slices are ranked by: float32[N, n_local], across shards [N, whole].

    Args:
        group: that it is of.
        scores: float32[N, n_local] of the group's ranked members.
        options: static arguments.
    """
    if options.score != "random":
        scores = combine_scores(scores, group.other_mesh, options.score)
    if group.compact is None:
        return scores
    # Everyone sees the scores of all shards, in the true order of the slices.
    shape = (len(scores), group.shards, group.n_local)
    everywhere = lax.dynamic_update_index_in_dim(
        *(jnp.zeros(shape, scores.dtype), scores),
        *(lax.axis_index(group.select_mesh), 1),
    )
    everywhere = lax.psum(everywhere, group.select_mesh).reshape(-1, group.whole)
    return everywhere[:, group.true_order().argsort()]


def select(group: Group, ranks: jax.Array | None) -> Selected:
    """The slices of one group to be updated, by `rank`; all without ranks."""
    if group.compact is not None:
        return _select_across(group, group.compact, ranks)
    if ranks is None:
        mask = jnp.ones((group.size, group.n_local), jnp.bool_)
        return Selected(None, None, mask, None)
    index = top_slices(ranks, group.k)
    mask = jnp.any(one_hot(index, None, group.n_local, jnp.bool_), axis=-1)
    return Selected(index, None, mask, None)


def _select_across(group: Group, compact: int, ranks) -> Selected:
    """The top slices of all shards, or of every set of them."""
    best = jnp.ones((group.size, group.n), jnp.bool_)
    if ranks is not None:
        part = group.n // group.sets
        rows = _windows(group, ranks).reshape(-1, part)
        best = top_slices(rows, compact // group.sets)
        best = jnp.any(one_hot(best, None, part, jnp.bool_), axis=-1)
    mask = jnp.concatenate(
        [
            jnp.pad(own, ((0, 0), (at := group.first(m), group.whole - at - group.n)))
            for m, own in by_member(group, best.reshape(-1, group.n))
        ]
    )[:, group.true_order()]
    shards = mask.reshape(-1, group.shards, group.n_local)
    shard = lax.axis_index(group.select_mesh)
    mine = lax.dynamic_index_in_dim(shards, shard, 1, keepdims=False)
    index, valid = ascending(mine, group.k)
    # The j-th selected slice of shard s arrives as row s * k + j.
    row = jnp.cumsum(shards, axis=-1, dtype=jnp.int32) - 1
    row += group.k * lax.broadcasted_iota(jnp.int32, (1, group.shards, 1), 1)
    taken, _ = ascending(mask, compact)
    rows = jnp.take_along_axis(row.reshape(mask.shape), taken, axis=1)
    return Selected(index, valid, mine, rows)


def _windows(group: Group, ranks: jax.Array) -> jax.Array:
    """float32[N, n]: of every member its own slices' ranks."""
    if not group.fused:
        return ranks
    first, starts = 0, {}
    for member in group.ranked:
        starts[member.leaf] = first
        first += member.count
    windows = []
    for m in group.members:
        rows = lax.slice_in_dim(ranks, starts[m.leaf], starts[m.leaf] + m.count)
        windows.append(lax.slice_in_dim(rows, m.start, m.start + group.n, axis=1))
    return jnp.concatenate(windows)


jax.tree_util.register_dataclass(
    Selected, data_fields=["index", "valid", "mask", "rows"], meta_fields=[]
)
