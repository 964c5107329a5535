"""One Dion2 step of the leaves of one mesh, inside shard_map.

Reads like the algorithm box of the paper (Ahn et al., arXiv:2512.16928):
accumulate, select, decay, exchange, orthogonalize, exchange back, update.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dion2_jax._exchange import (
    bring_home,
    owned_rows,
    select_owned,
    send,
    team_groups,
)
from dion2_jax._layout import Layout
from dion2_jax._normalize import neuron_factors
from dion2_jax._options import Options
from dion2_jax._orthogonalize import orthogonalize
from dion2_jax._plan import Exchange, Group, Member, Plan
from dion2_jax._selection import (
    ascending,
    combine_scores,
    gather,
    one_hot,
    random_scores,
    scatter,
    slice_scores,
    top_slices,
)


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


def dion2_step(plan: Plan, options: Options, leaves, scalars):
    """Updates, momentum and second moments of all leaves.

    Args:
        plan: what travels together.
        options: static arguments.
        leaves: for every leaf (gradient, momentum, second moment or None), its shard,
            and its position in the tree.
        scalars: ef_decay, eps, neuron_beta2 (or None), count.

    Returns:
        For every leaf (update, momentum, second moment or None).
    """
    ef_decay, eps, beta2, count = scalars
    momenta = [mu + g.astype(mu.dtype) for g, mu, _, _ in leaves]

    selected, stacks = [], []
    for group in plan.groups:
        scores = [
            _scores(
                *(plan.layout(m), group, m, momenta[m.leaf], options),
                *(count, leaves[m.leaf][3]),
            )
            for m in group.members
        ]
        chosen = _select(group, jnp.concatenate(scores), options)
        selected.append(chosen)
        picked = [
            gather(_matrices(momenta[m.leaf], plan.layout(m)), index, valid)
            for m, index, valid in _by_member(group, chosen.index, chosen.valid)
        ]
        stacks.append(jnp.concatenate([p.astype(options.dtype) for p in picked]))

    home: dict[int, list] = {g: [] for g in range(len(plan.groups))}
    for exchange in plan.exchanges:
        for segment, part in _exchange(plan, exchange, options, stacks, selected, eps):
            home[segment.group].append((segment.first, part))

    made: list = [[None] * len(blocks) for blocks in plan.layouts]
    for g, (group, chosen) in enumerate(zip(plan.groups, selected, strict=True)):
        parts = [part for _, part in sorted(home[g], key=lambda item: item[0])]
        u = jnp.concatenate(parts)
        factor = second = None
        if beta2 is not None:
            nus = [_nu_matrix(leaves[m.leaf][2], plan.layout(m)) for m in group.members]
            factor, second = _normalize(group, chosen, u, nus, beta2, options)
        for m, *arrays in _by_member(group, u, chosen, factor, second):
            made[m.leaf][m.block] = _place(plan.layout(m), group, m, *arrays)
    return [
        (jnp.zeros_like(leaf[0]), leaf[1], leaf[2])
        if None in blocks
        else _apply(layouts, leaf, momentum, ef_decay, blocks)
        for layouts, leaf, momentum, blocks in zip(
            plan.layouts, leaves, momenta, made, strict=True
        )
    ]


def to_matrices(x: jax.Array, layout: Layout) -> jax.Array:
    """`[N, n/p, c/q]`: the local shard with batch, select and other axes in front."""
    sizes = (layout.local_sizes(axes) for axes in (layout.batch, layout.select))
    lead = tuple(math.prod(s) for s in sizes)
    order = layout.batch + layout.select + layout.other
    return x.transpose(order).reshape(*lead, -1)


def from_matrices(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `to_matrices`."""
    order = layout.batch + layout.select + layout.other
    x = x.reshape(layout.local_sizes(order))
    return x.transpose([order.index(a) for a in range(len(order))])


def _per_slice(x: jax.Array, layout: Layout) -> jax.Array:
    """`[N, n/p]` in the axes of the leaf, size 1 along the other axes."""
    order = layout.batch + layout.select + layout.other
    x = x.reshape(
        *layout.local_sizes(layout.batch + layout.select), *(1 for _ in layout.other)
    )
    return x.transpose([order.index(a) for a in range(len(order))])


def _matrices(x: jax.Array, layout: Layout) -> jax.Array:
    """`[N, n_local, c_local]`: a leaf, or a fused one's block where it is apart."""
    x = to_matrices(x, layout)
    return _cut(x, layout, axis=1 if layout.select_is_output else 2)


def _cut(x: jax.Array, layout: Layout, axis: int) -> jax.Array:
    """A layout's block along the output, which is `axis`, where it is apart."""
    if not layout.apart:
        return x
    start, size = layout.block
    return lax.slice_in_dim(x, start, start + size, axis=axis)


def _nu_matrix(nu: jax.Array, layout: Layout) -> jax.Array:
    """`[N, n_local]` from the leaf's second moments, size 1 along the other axes."""
    order = layout.batch + layout.select + layout.other
    count = math.prod(layout.local_sizes(layout.batch))
    n = math.prod(layout.local_sizes(layout.select))
    return _cut(nu.transpose(order).reshape(count, n), layout, axis=1)


def _columns(group: Group, member: Member) -> jax.Array:
    """bool[1, 1, c_local]: which columns on this device are the member's own."""
    column = lax.broadcasted_iota(jnp.int32, (1, 1, group.c_local), 2)
    if not group.cut:
        return column >= 0
    column += lax.axis_index(group.other_mesh) * group.c_local
    return (column >= member.start) & (column < member.start + group.c)


def _by_member(group: Group, *arrays):
    """The members of a group, each with its part of the arrays `[N, ...]`."""
    first = 0
    for member in group.members:
        part = lambda x: x[first : first + member.count]  # noqa: E731, B023
        yield (member, *(jax.tree.map(part, a) for a in arrays))
        first += member.count


def _scores(layout: Layout, group, member, momentum, options: Options, count, leaf):
    """float32[N, n_local]: of one member's slices, as far as this device sees them."""
    kept = layout.batch + layout.select
    n = math.prod(layout.local_sizes(layout.select))
    if options.score == "random":
        whole = tuple(layout.shape[a] for a in kept)
        scores = random_scores(options.seed, count, (leaf, member.block), whole)
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
        own = _matrices(momentum, layout)
        if group.cut:
            own = jnp.where(_columns(group, member), own, 0)
        return slice_scores(own, (2,), options.score)
    scores = scores.reshape(-1, n)
    return _cut(scores, layout, axis=1) if layout.select_is_output else scores


def _select(group: Group, scores, options: Options) -> Selected:
    """The slices of one group to be updated."""
    if group.compact is None:
        return _select_here(group, scores, options)
    # Across shards: everyone sees all scores (a number a slice).
    shard = lax.axis_index(group.select_mesh)
    p = group.shards
    order = group.true_order()
    best = jnp.ones((group.size, group.n), jnp.bool_)
    if not group.takes_all:
        scores = _whole_slices(group, scores, options)
        everywhere = jnp.zeros((scores.shape[0], p, group.n_local), scores.dtype)
        everywhere = lax.dynamic_update_index_in_dim(everywhere, scores, shard, 1)
        everywhere = lax.psum(everywhere, group.select_mesh).reshape(-1, group.whole)
        ranked = jnp.concatenate(
            [
                lax.slice_in_dim(part, at := group.first(m), at + group.n, axis=1)
                for m, part in _by_member(group, everywhere[:, order.argsort()])
            ]
        )
        part = group.n // group.sets
        best = top_slices(ranked.reshape(-1, part), group.compact // group.sets)
        best = jnp.any(one_hot(best, None, part, jnp.bool_), axis=-1)
    mask = jnp.concatenate(
        [
            jnp.pad(own, ((0, 0), (at := group.first(m), group.whole - at - group.n)))
            for m, own in _by_member(group, best.reshape(-1, group.n))
        ]
    )[:, order]
    shards = mask.reshape(-1, p, group.n_local)
    mine = lax.dynamic_index_in_dim(shards, shard, 1, keepdims=False)
    index, valid = ascending(mine, group.k)
    # The j-th selected slice of shard s arrives as row s * k + j.
    rank = jnp.cumsum(shards, axis=-1, dtype=jnp.int32) - 1
    row = (rank + group.k * lax.iota(jnp.int32, p)[None, :, None]).reshape(mask.shape)
    taken, _ = ascending(mask, group.compact)
    return Selected(index, valid, mine, jnp.take_along_axis(row, taken, axis=1))


def _select_here(group: Group, scores, options: Options) -> Selected:
    """The top slices of every shard by itself."""
    if group.takes_all:
        return Selected(None, None, jnp.ones(scores.shape, jnp.bool_), None)
    index = top_slices(_whole_slices(group, scores, options), group.k)
    mask = jnp.any(one_hot(index, None, group.n_local, jnp.bool_), axis=-1)
    return Selected(index, None, mask, None)


def _whole_slices(group: Group, scores, options: Options):
    """Scores of whole slices from what the devices along the other axis see."""
    if options.score == "random":
        return scores
    return combine_scores(scores, group.other_mesh, options.score)


def _exchange(plan: Plan, exchange: Exchange, options, stacks, selected, eps):
    """Selected slices out, whole submatrices orthogonalized, and back."""
    owned = send(exchange, plan.groups, stacks)
    made = []
    for slot, pieces in zip(exchange.slots, owned, strict=True):
        groups = {s.group: plan.groups[s.group] for s in slot.segments}
        views, rows, columns = {}, {}, {}
        for g, group in groups.items():
            x = pieces[g]

            def owned(table, g=g, slot=slot):
                # Of other segments' matrices nothing is read under this group's view.
                tables = [
                    table
                    if s.group == g
                    else jnp.zeros(
                        (plan.groups[s.group].size, table.shape[1]), jnp.int32
                    )
                    for s in slot.segments
                ]
                return owned_rows(exchange, slot, tables)

            if group.compact is not None:
                rows[g] = owned(selected[g].rows)
                x = gather(x, rows[g], None)
            if group.cut:
                columns[g] = owned(_column_table(group))
                x = gather(x.mT, columns[g], None).mT
            views[g] = x.mT if group.splits_rows() else x
        x = select_owned(exchange, slot, [views[s.group] for s in slot.segments])
        x = _orthogonalize(x, exchange, slot, options, eps)
        back = {}
        for g, group in groups.items():
            u = x.mT if group.splits_rows() else x
            if g in columns:
                u = scatter(u.mT, columns[g], None, pieces[g].shape[2]).mT
            if g in rows:
                u = scatter(u, rows[g], None, pieces[g].shape[1])
            back[g] = u
        made.append(back)
    return bring_home(exchange, plan.groups, made)


def _column_table(group: Group) -> jax.Array:
    """int32[N, c]: where an owner finds the columns of every matrix of a cut group."""
    starts = np.repeat(
        [m.start for m in group.members], [m.count for m in group.members]
    )
    return jnp.asarray(starts[:, None] + np.arange(group.c), jnp.int32)


def _orthogonalize(x, exchange: Exchange, slot, options: Options, eps):
    """`[repeat, r, c/t]`, the rows being the short side of the whole matrix."""
    if options.newton_schulz_fn is not None:
        u = options.newton_schulz_fn(x)
        if not isinstance(u, jax.Array):
            raise TypeError(
                f"newton_schulz_fn returned {type(u).__name__} for a batch of matrices "
                f"of shape {x.shape}: it must return an array of that shape"
            )
        if u.shape != x.shape:
            raise ValueError(
                f"newton_schulz_fn returned shape {u.shape} for a batch of matrices "
                f"of shape {x.shape}: it must keep the shape"
            )
        return u.astype(x.dtype)
    combine = None
    if slot.team > 1:
        axes = exchange.replicas + exchange.axes
        teams = team_groups(exchange, slot)

        def combine(partial):
            return lax.psum(partial, axes, axis_index_groups=teams)

    return orthogonalize(
        x,
        table=options.table,
        norm_scale=options.norm_scale,
        eps=eps,
        method=options.method(exchange.shape, slot.team),
        combine=combine,
    )


def _normalize(group: Group, chosen: Selected, u, nus, beta2, options: Options):
    """float32[N, n/p] factors and new second moments of every neuron on this device."""
    squares = jnp.sum(jnp.square(u.astype(jnp.float32)), axis=-1)
    if group.other_mesh:
        squares = lax.psum(squares, group.other_mesh)
    nu = gather(jnp.concatenate(nus)[:, :, None], chosen.index, None)[:, :, 0]
    factor, second = neuron_factors(
        squares / group.c,
        nu.astype(jnp.float32),
        _sets(group, chosen),
        beta2,
        group.select_mesh if group.compact is not None else (),
    )
    if chosen.index is None:
        return factor, second
    hot = one_hot(chosen.index, chosen.valid, group.n_local, jnp.bool_)
    spread = lambda x: jnp.sum(jnp.where(hot, x[:, None, :], 0), axis=-1)  # noqa: E731
    return spread(factor), spread(second)


def _sets(group: Group, chosen: Selected) -> jax.Array:
    """bool[N, k, sets]: which of the competing sets every selected slice is of."""
    if chosen.index is None:
        return chosen.mask[:, :, None]
    index = jnp.zeros_like(chosen.index)
    if group.sets > 1:
        place = chosen.index + lax.axis_index(group.select_mesh) * group.n_local
        of = [place - group.first(m) for m, place in _by_member(group, place)]
        index = jnp.concatenate(of) // (group.n // group.sets)
    sets = index[:, :, None] == lax.iota(jnp.int32, group.sets)[None, None]
    return sets if chosen.valid is None else sets & chosen.valid[:, :, None]


def _place(layout: Layout, group: Group, member: Member, u, chosen, factor, second):
    """One member's update, and which of its entries were selected, as its leaf lies.

    Returns the update `[N, n_local, c_local]`, bool `[N, n_local, 1 or c_local]`, and
    for neurons their factors and second moments `[N, n_local]`, or None.
    """
    dense = scatter(u, chosen.index, chosen.valid, group.n_local)
    hot = chosen.mask[:, :, None]
    if layout.block and not layout.select_is_output:
        hot = hot & _columns(group, member)
    return dense, hot, factor, second


def _apply(layouts, leaf, momentum, ef_decay, blocks):
    """Update, decayed momentum and second moments of one leaf."""
    g, mu, nu, _ = leaf
    layout = layouts[0]
    if len(layouts) == 1:
        dense, hot, factor, second = blocks[0]
    else:
        dense, hot, factor, second = _join(layouts, blocks)
    spread = from_matrices if hot.shape[2] == dense.shape[2] else _per_slice
    decayed = (ef_decay * momentum).astype(mu.dtype)
    mu = jnp.where(spread(hot, layout), decayed, momentum)
    update = from_matrices(dense, layout)
    if factor is not None:
        update = update.astype(jnp.float32) * _per_slice(factor, layout)
        second = _per_slice(second, layout).astype(nu.dtype)
        nu = jnp.where(spread(hot, layout), second, nu)
    return update.astype(g.dtype), mu, nu


def _join(layouts, blocks):
    """The blocks of a fused leaf as one matrix, slices as in the first layout."""
    first = layouts[0]
    dense, hot, factor, second = zip(*blocks, strict=True)
    axis = 1 if first.select_is_output else 2
    turned = [x.select_is_output != first.select_is_output for x in layouts]
    mixed = any(not x.select_is_output for x in layouts)

    def aligned(arrays):
        return [x.mT if turn else x for x, turn in zip(arrays, turned, strict=True)]

    if mixed:
        hot = [jnp.broadcast_to(h, d.shape) for h, d in zip(hot, dense, strict=True)]
    dense, masks = aligned(dense), aligned(hot)

    def together(arrays, axis):
        if first.apart:
            return jnp.concatenate(arrays, axis)
        joined = jnp.zeros_like(arrays[0])
        for array, mask in zip(arrays, masks, strict=True):
            joined = jnp.where(
                mask if array.ndim == 3 else mask[:, :, 0], array, joined
            )
        return joined

    hot, dense = together(masks, axis), together(dense, axis)
    if factor[0] is None:
        return dense, hot, None, None
    return dense, hot, together(factor, 1), together(second, 1)


jax.tree_util.register_dataclass(
    Selected, data_fields=["index", "valid", "mask", "rows"], meta_fields=[]
)
