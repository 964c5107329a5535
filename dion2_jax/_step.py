"""One Dion2 step of the leaves of one mesh, inside shard_map.

Reads like the algorithm box of the paper (Ahn et al., arXiv:2512.16928):
accumulate, select, decay, exchange, orthogonalize, exchange back, update.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from dion2_jax._arguments import call
from dion2_jax._exchange import (
    bring_home,
    owned_rows,
    select_owned,
    send,
    team_groups,
)
from dion2_jax._groups import Group, Member
from dion2_jax._normalize import neuron_factors
from dion2_jax._options import Options
from dion2_jax._orthogonalize import orthogonalize
from dion2_jax._plan import Exchange, Plan
from dion2_jax._ranking import Selected, by_member, own_columns, select_group
from dion2_jax._selection import gather, one_hot, scatter
from dion2_jax._views import (
    from_matrices,
    join_blocks,
    join_masks,
    matrices_of,
    neurons_of,
    per_slice,
)


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
    stacks, selected, hot, mus = _select(plan, options, leaves, ef_decay, count)

    home: dict[int, list] = {g: [] for g in range(len(plan.groups))}
    for exchange in plan.exchanges:
        for segment, part in _exchange(plan, exchange, options, stacks, selected, eps):
            home[segment.group].append((segment.first, part))

    made: list[list] = [[None] * len(blocks) for blocks in plan.layouts]
    for g, (group, chosen) in enumerate(zip(plan.groups, selected, strict=True)):
        parts = [part for _, part in sorted(home[g], key=lambda item: item[0])]
        u = jnp.concatenate(parts)
        factor = second = None
        if beta2 is not None:
            nus = [neurons_of(leaves[m.leaf][2], plan.layout(m)) for m in group.members]
            factor, second = _normalize(group, chosen, u, nus, beta2)
        for m, part, own, *neurons in by_member(group, u, chosen, factor, second):
            dense = scatter(part, own.index, own.valid, group.n_local)
            made[m.leaf][m.block] = (dense, *neurons)
    done = []
    for i, (g, _, nu, _) in enumerate(leaves):
        if None in made[i]:  # no elements
            done.append((jnp.zeros_like(g), mus[i], nu))
            continue
        update, nu = _update(plan.layouts[i], hot[i], made[i], g, nu)
        done.append((update, mus[i], nu))
    return done


def _select(plan: Plan, options: Options, leaves, ef_decay, count):
    """What is selected, group by group.

    Returns:
        For every group the selected slices `[N, k, c_local]`, and which they are; for
        every leaf masks of its blocks, as `_hot` says, and the momentum, decayed.
    """
    momenta: dict[int, jax.Array] = {}
    mus = [mu for _, mu, _, _ in leaves]
    positions = [position for _, _, _, position in leaves]
    hot: list[list] = [[None] * len(blocks) for blocks in plan.layouts]
    ranks: dict[int, jax.Array] = {}
    stacks, selected = [], []
    for g, group in enumerate(plan.groups):
        for m in group.members:
            if m.leaf not in momenta:
                gradient, mu = leaves[m.leaf][0], mus[m.leaf]
                momenta[m.leaf] = mu + gradient.astype(mu.dtype)
        chosen = select_group(plan, g, options, momenta, positions, count, ranks)
        picked = []
        for m, own in by_member(group, chosen):
            momentum = momenta[m.leaf]
            x = matrices_of(momentum, plan.layout(m))
            # A cast before the gather would write the whole shard once more.
            picked.append(gather(x, own.index, own.valid).astype(options.dtype))
            hot[m.leaf][m.block] = _hot(plan, group, m, own)
            if all(mask is not None for mask in hot[m.leaf]):
                blocks = plan.layouts[m.leaf], hot[m.leaf]
                mus[m.leaf] = _decay(*blocks, momentum, ef_decay)
        # One group after the other, each to its end: sums of momentum and gradient
        # need not outlive their group (of a fused leaf, that of its last block), and
        # stay on the chip if those of a group fit.
        stack, mus = lax.optimization_barrier((jnp.concatenate(picked), mus))
        stacks.append(stack)
        selected.append(chosen)
    return stacks, selected, hot, mus


def _exchange(plan: Plan, exchange: Exchange, options, stacks, selected, eps):
    """Selected slices out, whole submatrices orthogonalized, and back."""
    owned = send(exchange, plan.groups, stacks)
    made = []
    for slot, pieces in zip(exchange.slots, owned, strict=True):
        groups = {s.group: plan.groups[s.group] for s in slot.segments}
        views: dict[int, jax.Array] = {}
        rows: dict[int, jax.Array] = {}
        columns: dict[int, jax.Array] = {}
        for g, group in groups.items():
            x = pieces[g]
            if group.compact is not None:
                rows[g] = _owned(plan, exchange, slot, g, selected[g].rows)
                x = gather(x, rows[g], None)
            if group.cut:
                columns[g] = _owned(plan, exchange, slot, g, _column_table(group))
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


def _owned(plan: Plan, exchange: Exchange, slot, g: int, table):
    """`[repeat, ...]`: of a table of group g the rows of what this device owns."""
    # Of other segments' matrices nothing is read under this group's view.
    tables = [
        table
        if s.group == g
        else jnp.zeros((plan.groups[s.group].size, table.shape[1]), jnp.int32)
        for s in slot.segments
    ]
    return owned_rows(exchange, slot, tables)


def _column_table(group: Group) -> jax.Array:
    """int32[N, c]: where an owner finds the columns of every matrix of a cut group."""
    starts = np.repeat(
        [m.start for m in group.members], [m.count for m in group.members]
    )
    return jnp.asarray(starts[:, None] + np.arange(group.c), jnp.int32)


def _orthogonalize(x, exchange: Exchange, slot, options: Options, eps):
    """`[repeat, r, c/t]`, the rows being the short side of the whole matrix."""
    if options.newton_schulz_fn is not None:
        u = call("newton_schulz_fn", options.newton_schulz_fn, x)
        if not isinstance(u, jax.Array):
            raise TypeError(
                f"newton_schulz_fn returned {type(u).__name__} for a batch of matrices "
                f"of shape {x.shape}: it must return an array of that shape"
            )
        if not jnp.issubdtype(u.dtype, jnp.floating):
            raise TypeError(
                f"newton_schulz_fn returned dtype {u.dtype} for a batch of matrices of "
                f"{x.dtype}: it must return real floating numbers"
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


def _normalize(group: Group, chosen: Selected, u, nus, beta2):
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
        of = [place - group.first(m) for m, place in by_member(group, place)]
        index = jnp.concatenate(of) // (group.n // group.sets)
    sets = index[:, :, None] == lax.iota(jnp.int32, group.sets)[None, None]
    return sets if chosen.valid is None else sets & chosen.valid[:, :, None]


def _hot(plan: Plan, group: Group, member: Member, chosen: Selected) -> jax.Array:
    """bool `[N, n_local, 1]`: which slices of a member are selected.

    `[N, n_local, c_local]` where any block of a fused leaf selects along the reduction.
    """
    hot = chosen.mask[:, :, None]
    layouts = plan.layouts[member.leaf]
    if len(layouts) == 1 or all(layout.select_is_output for layout in layouts):
        return hot
    return hot & own_columns(group, member)


def _spread(layouts, masks) -> jax.Array:
    """Where a leaf's entries are selected, as the leaf lies; size 1 where alike."""
    mask = join_masks(layouts, masks)
    place = per_slice if mask.shape[2] == 1 else from_matrices
    return place(mask, layouts[0])


def _decay(layouts, masks, momentum, ef_decay) -> jax.Array:
    """Momentum, multiplied by `ef_decay` where it was selected."""
    decayed = (ef_decay * momentum).astype(momentum.dtype)
    decayed = jnp.where(_spread(layouts, masks), decayed, momentum)
    # Else the layout that the gather asks for, transposed, may reach the state.
    return with_layout_constraint(decayed, Layout(tuple(range(decayed.ndim))))


def _update(layouts, masks, blocks, g, nu):
    """Update and second moments of one leaf, from those of its blocks.

    blocks: of every block the update `[N, n_local, c_local]`, and of neurons their
    factors and second moments `[N, n_local]`, or None.
    """
    layout = layouts[0]
    dense, factors, seconds = zip(*blocks, strict=True)
    update = from_matrices(join_blocks(layouts, masks, dense), layout)
    if factors[0] is not None:
        factor = join_blocks(layouts, masks, factors)
        update = update.astype(jnp.float32) * per_slice(factor, layout)
        second = per_slice(join_blocks(layouts, masks, seconds), layout)
        nu = jnp.where(_spread(layouts, masks), second.astype(nu.dtype), nu)
    return update.astype(g.dtype), nu
