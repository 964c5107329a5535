"""One Dion2 step of the leaves of one mesh, inside shard_map.

Reads like the algorithm box of the paper (Ahn et al., arXiv:2512.16928):
accumulate, select, decay, exchange, orthogonalize, exchange back, update.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
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
from dion2_jax._plan import Exchange, Group, Plan
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

    index: int32[N, k] on this device; valid: bool[N, k], or None if all are;
    mask: bool[N, n/p]. rows: int32[N, K], where an owner finds the K selected slices
    among those sent, or None if all sent are selected.
    """

    index: jax.Array
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
        scores = jnp.concatenate(
            [
                _scores(plan.layouts[i], momenta[i], options, count, leaves[i][3])
                for i in group.leaves
            ]
        )
        chosen = _select(group, scores, options)
        selected.append(chosen)
        picked = [
            gather(to_matrices(momenta[i], plan.layouts[i]), index, valid)
            for i, index, valid in _by_leaf(group, chosen.index, chosen.valid)
        ]
        stacks.append(jnp.concatenate([p.astype(options.dtype) for p in picked]))

    home: dict[int, list] = {g: [] for g in range(len(plan.groups))}
    for exchange in plan.exchanges:
        for segment, part in _exchange(plan, exchange, options, stacks, selected, eps):
            home[segment.group].append((segment.first, part))

    results: list = [None] * len(leaves)
    for g, (group, chosen) in enumerate(zip(plan.groups, selected, strict=True)):
        parts = [part for _, part in sorted(home[g], key=lambda item: item[0])]
        u = jnp.concatenate(parts)
        factor = second = None
        if beta2 is not None:
            nus = [_nu_matrix(leaves[i][2], plan.layouts[i]) for i in group.leaves]
            factor, second = _normalize(group, chosen, u, nus, beta2, options)
        for i, *arrays in _by_leaf(group, u, chosen, factor, second):
            results[i] = _apply(
                plan.layouts[i], group, leaves[i], momenta[i], ef_decay, *arrays
            )
    return [
        (jnp.zeros_like(g), mu, nu) if result is None else result
        for result, (g, mu, nu, _) in zip(results, leaves, strict=True)
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


def _nu_matrix(nu: jax.Array, layout: Layout) -> jax.Array:
    """`[N, n/p]` from the leaf's second moments, size 1 along the other axes."""
    order = layout.batch + layout.select + layout.other
    count = math.prod(layout.local_sizes(layout.batch))
    n = math.prod(layout.local_sizes(layout.select))
    return nu.transpose(order).reshape(count, n)


def _by_leaf(group: Group, *arrays):
    """The leaves of a group, each with its part of the arrays `[N, ...]`."""
    first = 0
    for leaf, count in zip(group.leaves, group.counts, strict=True):
        part = lambda x: x[first : first + count]  # noqa: E731, B023
        yield (leaf, *(jax.tree.map(part, a) for a in arrays))
        first += count


def _scores(layout: Layout, momentum, options: Options, count, leaf: int):
    """float32[N, n/p]: scores of one leaf's slices, as far as this device sees them."""
    kept = layout.batch + layout.select
    n = math.prod(layout.local_sizes(layout.select))
    if options.score == "random":
        whole = tuple(layout.shape[a] for a in kept)
        scores = random_scores(options.seed, count, leaf, whole)
        starts = [
            lax.axis_index(names) * size if (names := layout.names[a]) else 0
            for a, size in zip(kept, layout.local_sizes(kept), strict=True)
        ]
        scores = lax.dynamic_slice(scores, starts, layout.local_sizes(kept))
        return scores.reshape(-1, n)
    scores = slice_scores(momentum, layout.other, options.score)
    order = sorted(kept)
    return scores.transpose([order.index(a) for a in kept]).reshape(-1, n)


def _select(group: Group, scores, options: Options) -> Selected:
    """The slices of one group to be updated."""
    if options.score != "random":
        scores = combine_scores(scores, group.other_mesh, options.score)
    if group.compact is None:
        index = top_slices(scores, group.k)
        mask = jnp.any(one_hot(index, None, group.n_local, jnp.bool_), axis=-1)
        return Selected(index, None, mask, None)
    # Exact selection over shards: everyone sees all scores (n numbers a matrix).
    shard = lax.axis_index(group.select_mesh)
    p = group.n // group.n_local
    everywhere = jnp.zeros((scores.shape[0], p, group.n_local), scores.dtype)
    everywhere = lax.dynamic_update_index_in_dim(everywhere, scores, shard, 1)
    everywhere = lax.psum(everywhere, group.select_mesh).reshape(-1, group.n)
    order = group.true_order()
    ranked = everywhere[:, order.argsort()]
    best = top_slices(ranked, group.compact)
    mask = jnp.any(one_hot(best, None, group.n, jnp.bool_), axis=-1)[:, order]
    shards = mask.reshape(-1, p, group.n_local)
    mine = lax.dynamic_index_in_dim(shards, shard, 1, keepdims=False)
    index, valid = ascending(mine, group.k)
    # The j-th selected slice of shard s arrives as row s * k + j.
    rank = jnp.cumsum(shards, axis=-1, dtype=jnp.int32) - 1
    row = (rank + group.k * lax.iota(jnp.int32, p)[None, :, None]).reshape(mask.shape)
    taken, _ = ascending(mask, group.compact)
    return Selected(index, valid, mine, jnp.take_along_axis(row, taken, axis=1))


def _exchange(plan: Plan, exchange: Exchange, options, stacks, selected, eps):
    """Selected slices out, whole submatrices orthogonalized, and back."""
    owned = send(exchange, plan.groups, stacks)
    made = []
    for slot, pieces in zip(exchange.slots, owned, strict=True):
        groups = {s.group: plan.groups[s.group] for s in slot.segments}
        views, rows = {}, {}
        for g, group in groups.items():
            x = pieces[g]
            if group.compact is not None:
                # Of other segments' matrices nothing is read under this group's view.
                tables = [
                    selected[g].rows
                    if s.group == g
                    else jnp.zeros(
                        (plan.groups[s.group].size, group.compact), jnp.int32
                    )
                    for s in slot.segments
                ]
                rows[g] = owned_rows(exchange, slot, tables)
                x = gather(x, rows[g], None)
            views[g] = x.mT if group.splits_rows() else x
        x = select_owned(exchange, slot, [views[s.group] for s in slot.segments])
        x = _orthogonalize(x, exchange, slot, options, eps)
        back = {}
        for g, group in groups.items():
            u = x.mT if group.splits_rows() else x
            if group.compact is not None:
                u = scatter(u, rows[g], None, pieces[g].shape[1])
            back[g] = u
        made.append(back)
    return bring_home(exchange, plan.groups, made)


def _orthogonalize(x, exchange: Exchange, slot, options: Options, eps):
    """`[repeat, r, c/t]`, the rows being the short side of the whole matrix."""
    if options.newton_schulz_fn is not None:
        u = options.newton_schulz_fn(x)
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
    nu = jnp.concatenate(nus).astype(jnp.float32)
    axes = () if options.per_shard else group.select_mesh
    factor, second = neuron_factors(
        squares / group.c,
        jnp.take_along_axis(nu, chosen.index, axis=1),
        chosen.valid,
        beta2,
        axes,
    )
    hot = one_hot(chosen.index, chosen.valid, group.n_local, jnp.bool_)
    spread = lambda x: jnp.sum(jnp.where(hot, x[:, None, :], 0), axis=-1)  # noqa: E731
    return spread(factor), jnp.where(chosen.mask, spread(second), nu)


def _apply(layout, group, leaf, momentum, ef_decay, u, chosen, factor, second):
    """Update, decayed momentum and second moments of one leaf."""
    g, mu, nu, _ = leaf
    decayed = (ef_decay * momentum).astype(mu.dtype)
    mu = jnp.where(_per_slice(chosen.mask, layout), decayed, momentum)
    dense = scatter(u, chosen.index, chosen.valid, group.n_local)
    update = from_matrices(dense, layout)
    if factor is not None:
        update = update.astype(jnp.float32) * _per_slice(factor, layout)
        nu = _per_slice(second, layout).astype(nu.dtype)
    return update.astype(g.dtype), mu, nu


jax.tree_util.register_dataclass(
    Selected, data_fields=["index", "valid", "mask", "rows"], meta_fields=[]
)
