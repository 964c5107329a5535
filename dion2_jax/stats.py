"""Numbers about a running optimizer, for a logger: what is selected, and what it does.

Pure functions beside `update`: the optimizer, its state and its numbers stay as they
are, and nothing is computed where they are not called.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dion2_jax._layout import Layout
from dion2_jax._leaves import (
    check_floating,
    check_gradient,
    is_dimensions,
    is_splits,
    resolve_layouts,
)
from dion2_jax._matrices import matrix_dimension_numbers
from dion2_jax._measure import Leaf, measure_plan
from dion2_jax._options import Options
from dion2_jax._plan import Plan
from dion2_jax._settings import plans_by_mesh, read_settings
from dion2_jax._transform import ScaleByDion2State, laid_as
from dion2_jax._trees import leaf_paths, name_of, resolve_entries

NAMES = ("gradient", "parameter", "update")  # of what `measure` gets of a leaf


class Stats(NamedTuple):
    """The two functions that `stats` returns."""

    init: Callable[[Any], Any]
    measure: Callable[..., tuple[dict, Any]]


def stats(fraction: float = 0.25, **arguments) -> Stats:
    """Functions that measure a step of `dion2` with these arguments.

    Both may be called inside `jit`, on any layout that `dion2` takes.

    `init(params)` returns the waits: for every leaf `int32[M, n]`, of its M matrices of
    n slices, in their order, how many steps each has waited. As small as one number a
    slice.

    `measure(grads, state, params, waits=None, updates=None)` returns report and waits:

    - grads, params: what `update` was called with.
    - state: what `update` was called with, the state before the step: any that holds
      one `ScaleByDion2State`.
    - waits: of `init` or of the last step, or None: waits are not counted. Call
      `measure` at every step, or they count calls instead of steps; XLA leaves out
      what of the report is not read.
    - updates: what `update` returned, or None: its numbers are left out. Give them on
      emulated devices if the optimizer is inside `lax.cond`, as in
      `optax.apply_if_finite`: nothing is then measured before they are there, and
      collectives cannot wait for each other.

    The report is `{"leaves": {path: numbers}, "groups": {"#0": numbers}}`, with the
    paths and groups of `describe`. Matrices that are stacked, or of one group, are
    taken together. The numbers are `float32[]`:

    - selected_mass: share of the momentum's L1 mass, gradient added, that the step
      selects. About `fraction` where all slices are alike; where it is much larger, a
      smaller fraction may do.
    - norm_min, norm_p10, norm_p25, norm_p50, norm_p75, norm_p90, norm_max: quantiles
      of the L1 norms of slices, in units of the mean slice of their matrix. All near
      1: flat.
    - wait_mean: steps that the slices selected now have waited, 1: also selected in
      the step before. Near 1 / fraction where all have their turn, below it where some
      never have.
    - wait_max: steps that the slice not selected for longest has waited.
    - orthogonality_error: `|U U^T / s - 1|_F / sqrt(r)` of the selected submatrix U of
      the update, r its short side, put first, s the mean of the diagonal of U U^T: 0
      where all singular values are alike, whatever the learning rate. Random
      vectors estimate it, others at every step, roughly where r is small: the mean of
      squares over steps has no bias. Weight decay in `updates` and normalized neurons
      add to it.
    - update_to_parameter: Frobenius norm of the update over the parameter's.

    What another fraction would select of the same momentum is measured by the `stats`
    of that fraction, without `waits` and `updates`.

    Args:
        fraction, arguments: of `dion2`, without the learning rate; for `dion3` with
            `neuron_beta2=0.95`.

    Raises:
        ValueError, TypeError: as `dion2` and its `update` would; the state holds no
            momentum of these matrices.

    Examples:
        >>> import dion2_jax
        >>> params = {"kernel": jnp.ones((8, 16))}
        >>> tx, stats = dion2_jax.dion2(0.1, 0.5), dion2_jax.stats(0.5)
        >>> state, waits = tx.init(params), stats.init(params)
        >>> updates, after = tx.update(params, state, params)
        >>> report, waits = stats.measure(params, state, params, waits, updates)
        >>> float(report["leaves"]["kernel"]["selected_mass"])
        0.5
    """
    given, options = read_settings("stats", fraction, arguments)

    def matrices(params):
        """Paths and leaves of the matrices, and a function: their arrays -> layouts."""
        paths, leaves, treedef = leaf_paths(params)
        check_floating(paths, leaves)
        rule = given["weight_dimension_numbers"]
        rule = matrix_dimension_numbers if rule is None else rule
        entries, splits = (
            resolve_entries(name, value, params, is_entry)
            for name, value, is_entry in (
                ("weight_dimension_numbers", rule, is_dimensions),
                ("weight_splits", given["weight_splits"], is_splits),
            )
        )
        taken = [i for i, entry in enumerate(entries) if entry]

        def layouts(arrays) -> list[tuple[Layout, ...]]:
            masked: list = [None] * len(paths)
            for i, x in zip(taken, arrays, strict=True):
                masked[i] = x
            return resolve_layouts(
                treedef.unflatten(masked),
                treedef.unflatten(entries),
                treedef.unflatten(splits),
                given["param_shardings"],
                given["select_axis"],
                neurons=given["neuron_beta2"] is not None,
            )

        return [paths[i] for i in taken], [leaves[i] for i in taken], layouts

    def init(params):
        _, leaves, layouts = matrices(params)
        return tuple(
            tuple(_no_waits(layout, x) for layout in blocks)
            for x, blocks in zip(leaves, layouts(leaves), strict=True)
        )

    def measure(grads, state, params, waits=None, updates=None):
        paths, parameters, layouts = matrices(params)
        state = _find_state(state)
        momenta = _momenta_of(state, paths)
        blocks = layouts(momenta)
        gradients = _at(grads, paths)
        made = [None] * len(paths) if updates is None else _at(updates, paths)
        waiting = [None] * len(paths) if waits is None else _by_leaf(waits, blocks)
        present = [i for i, g in enumerate(gradients) if g is not None]
        leaves = []
        for i in present:
            three = gradients[i], parameters[i], made[i]
            for what, x in zip(NAMES, three, strict=True):
                if x is not None:
                    check_gradient(paths[i], momenta[i], x, what)
            gradient, parameter, update = (
                None if x is None else laid_as(x, blocks[i][0]) for x in three
            )
            leaves.append(Leaf(gradient, momenta[i], parameter, update, waiting[i]))
        by_leaf: dict[str, dict] = {}
        by_group: dict[str, dict] = {}
        for here, plan in plans_by_mesh(
            [blocks[i] for i in present],
            [momenta[i].dtype for i in present],
            *(given, options),
        ):
            at = tuple(present[n] for n in here)
            found = _compiled(plan, options, at)([leaves[n] for n in here], state.count)
            for i, numbers, new in zip(at, found[0], found[2], strict=True):
                waiting[i] = new
                if numbers:
                    by_leaf[name_of(paths[i])] = numbers
            for numbers in found[1]:
                by_group[f"#{len(by_group)}"] = numbers
        report = {"leaves": by_leaf, "groups": by_group}
        return report, None if waits is None else tuple(waiting)

    return Stats(init, measure)


@functools.lru_cache(maxsize=64)
def _compiled(plan: Plan, options: Options, positions: tuple[int, ...]):
    """The jitted `measure_plan` of the leaves of one mesh."""
    run = functools.partial(measure_plan, plan, options, positions)
    mesh = plan.layouts[0][0].mesh
    if mesh is None:
        return jax.jit(run)
    everywhere = PartitionSpec()
    specs = [Leaf(*(layout.spec,) * 4, waits=everywhere) for layout, *_ in plan.layouts]
    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(specs, everywhere),
            out_specs=everywhere,
            check_vma=False,
        )
    )


def _find_state(state) -> ScaleByDion2State:
    """The one `ScaleByDion2State` in an optimizer's state."""
    ours = lambda x: isinstance(x, ScaleByDion2State)  # noqa: E731
    found = [x for x in jax.tree.leaves(state, is_leaf=ours) if ours(x)]
    if len(found) != 1:
        raise ValueError(
            f"expected an optimizer's state with one ScaleByDion2State in it, found "
            f"{len(found)} in {type(state).__name__}: give measure the state that "
            f"update was called with"
        )
    return found[0]


def _momenta_of(state: ScaleByDion2State, paths) -> list:
    """The momentum of every matrix, in the order of `paths`."""
    found = dict(zip(*leaf_paths(state.mu)[:2], strict=True))
    for path in paths:
        if path not in found:
            raise ValueError(
                f"the state has no momentum for the matrix {name_of(path)!r}: give "
                f"stats the arguments that the optimizer was made with"
            )
    for path in found.keys() - set(paths):
        raise ValueError(
            f"the state has momentum for {name_of(path)!r}, which is no matrix of "
            f"these parameters by the arguments of stats: give it those that the "
            f"optimizer was made with"
        )
    return [found[path] for path in paths]


def _by_leaf(waits, blocks: list[tuple[Layout, ...]]) -> list[tuple]:
    """Of every leaf its waits, one array a block."""
    wanted = [_waits_shape(layout) for leaf in blocks for layout in leaf]
    arrays = jax.tree.leaves(waits)
    found = [jnp.shape(x) for x in arrays]
    if found != wanted:
        raise ValueError(
            f"expected waits of shapes {wanted}, found {found}: give what init(params) "
            f"of these stats returned, or measure at the step before"
        )
    left = iter(arrays)
    return [tuple(next(left) for _ in leaf) for leaf in blocks]


def _at(tree, paths) -> list:
    """The leaf of every path; None where there is none."""
    found = dict(zip(*leaf_paths(tree)[:2], strict=True))
    return [found.get(path) for path in paths]


def _waits_shape(layout: Layout) -> tuple[int, int]:
    """(M, n): matrices of one leaf or block, and slices of each."""
    size = lambda axes: math.prod(layout.shape[a] for a in axes)  # noqa: E731
    n = size(layout.select)
    if layout.block and layout.select_is_output:
        n = layout.block[1]
    return size(layout.batch), n


def _no_waits(layout: Layout, x) -> jax.Array:
    """int32[M, n] of zeros for one leaf or block, on all devices of its mesh."""
    device = None
    if isinstance(layout.mesh, Mesh) and not isinstance(x, jax.core.Tracer):
        device = NamedSharding(layout.mesh, PartitionSpec())
    return jnp.zeros(_waits_shape(layout), jnp.int32, device=device)
