"""scale_by_dion2: state, init and update of the transformation alone."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dion2_jax import _arguments as check
from dion2_jax._layout import SELECT_AXES, Layout, check_placed
from dion2_jax._leaves import (
    check_gradient,
    check_momenta,
    check_values,
    gradients_of,
    resolve_layouts,
)
from dion2_jax._options import Options, make_options
from dion2_jax._plan import Plan, make_plan
from dion2_jax._sharding import counters_beside
from dion2_jax._step import dion2_step
from dion2_jax._trees import leaf_paths

SCALE_BY_DION2_STATIC_ARGS = (
    *("fraction", "selection", "select_axis", "score", "seed", "ns_coeffs"),
    *("ns_steps", "ns_method", "ns_dtype", "newton_schulz_fn", "mu_dtype"),
    *("weight_dimension_numbers", "weight_splits", "param_shardings"),
    *("share_replicas", "max_exchange_bytes"),
)


class ScaleByDion2State(NamedTuple):
    """State of `scale_by_dion2`: arrays only, momentum sharded as the parameters are.

    Attributes:
        count: int32[], steps taken.
        mu: momentum, shaped and sharded like the parameters.
        nu: float32 second moments, like the parameters with reduction axes of size 1,
            or None without `neuron_beta2`.
    """

    count: jax.Array  # type: ignore[assignment]  # as optax names it
    mu: Any
    nu: Any = None


def scale_by_dion2(
    fraction: float = 0.25,
    ef_decay: jax.typing.ArrayLike = 0.95,
    *,
    selection: str = "local",
    select_axis: str = "sharded",
    score: str = "l1",
    seed: int = 0,
    ns_coeffs="polar_express",
    ns_steps: int = 5,
    ns_method: str = "direct",
    ns_dtype=jnp.bfloat16,
    newton_schulz_fn: Callable[[jax.Array], jax.Array] | None = None,
    eps: jax.typing.ArrayLike = 1e-8,
    mu_dtype=None,
    neuron_beta2: jax.typing.ArrayLike | None = None,
    weight_dimension_numbers=None,
    weight_splits=None,
    param_shardings=None,
    share_replicas: bool = True,
    max_exchange_bytes: int = 256 * 2**20,
) -> optax.GradientTransformationExtraArgs:
    """Momentum of which the heaviest slices are orthogonalized, sharded throughout.

    Every step adds the gradient to the momentum, selects the top slices of every
    matrix (rows or columns) by their norm, orthogonalizes the selected submatrix by
    Newton-Schulz, and decays the selected slices of the momentum alone. The update is
    the orthogonalized submatrix in place, zero elsewhere, in the gradient's dtype.

    Args:
        fraction: share of the slices selected, in (0, 1]; the paper's alpha.
        ef_decay: what selected slices of momentum are multiplied by; the paper's mu.
            May be traced.
        selection: "local": the top slices of every shard. "global": those of the whole
            matrix; with a `select_axis` other than "sharded" the same on every mesh.
        select_axis: "sharded": the sharded matrix axis (both: the one with more shards;
            none: the shorter, on a tie the output axis). "shorter": by shape alone.
            "output" or "reduction": that axis. With `neuron_beta2` "sharded" means
            "output".
        score: what slices are ranked by: "l1", "l2" or "random".
        seed: of `score="random"`; reproducible from seed and step.
        ns_coeffs: "polar_express", "classic", "muon", a table of (a, b, c), or one.
        ns_steps: Newton-Schulz iterations.
        ns_method: "direct", "gram" (on the Gram matrix), or "auto": the cheaper.
        ns_dtype: bfloat16 or float32 (full-precision products), in which the selected
            slices travel and are orthogonalized.
        newton_schulz_fn: `f([batch, r, c]) -> [batch, r, c]`, r <= c, in place of the
            four above and `eps`.
        eps: added to the scaled Frobenius norm. May be traced.
        mu_dtype: dtype of the momentum; None: the parameter's.
        neuron_beta2: None, or the decay of NorDion2's second moment per neuron, by
            which the update is rescaled. May be traced.
        weight_dimension_numbers: `optax.contrib.MuonDimensionNumbers` per leaf: tree,
            prefix, one for all, or a function of the parameters. None:
            `matrix_dimension_numbers`.
        weight_splits: for fused weights, a tuple of block sizes along the output per
            leaf, or None: tree, prefix, one for all, or a function. Every block is a
            matrix of its own, as if it were a parameter.
        param_shardings: `NamedSharding` or `PartitionSpec` per leaf: tree, prefix, one
            for all, or a function. Needed on Auto mesh axes, whose arrays do not carry
            their partition in their type.
        share_replicas: devices that hold the same matrices divide the orthogonalization
            among them and gather the results.
        max_exchange_bytes: largest buffer of one all-to-all on a device; more goes in
            several rounds.

    Returns:
        An `optax.GradientTransformationExtraArgs` with `ScaleByDion2State`.

    Raises:
        ValueError, TypeError: an argument, or a leaf's layout, shape or dtype. The
            message names it, what was found and what was expected.

    Examples:
        >>> params = {"kernel": jnp.ones((4, 6))}
        >>> tx = optax.chain(scale_by_dion2(fraction=0.5), optax.scale(-0.02))
        >>> updates, state = tx.update(params, tx.init(params))
        >>> jnp.any(updates["kernel"] != 0, axis=1).tolist()  # half of the rows
        [True, True, False, False]

    References:
        Ahn, Amsel, Langford: Dion2, 2025, https://arxiv.org/abs/2512.16928.
    """
    fraction = check.check_fraction(fraction, "SCALE_BY_DION2_STATIC_ARGS")
    ef_decay = check.check_number("ef_decay", ef_decay, most=1.0)
    eps = check.check_number("eps", eps)
    neuron_beta2 = check.check_number(
        "neuron_beta2", neuron_beta2, most=1.0, optional=True
    )
    check.check_choice("selection", selection, ("local", "global"))
    check.check_choice("select_axis", select_axis, SELECT_AXES)
    max_exchange_bytes = check.check_int("max_exchange_bytes", max_exchange_bytes, 1)
    check.check_bool("share_replicas", share_replicas)
    momentum_dtype = check.check_dtype(
        "mu_dtype", mu_dtype, check.FLOATS, optional=True
    )
    options = make_options(
        score=score,
        seed=seed,
        ns_coeffs=ns_coeffs,
        ns_steps=ns_steps,
        ns_method=ns_method,
        ns_dtype=ns_dtype,
        newton_schulz_fn=newton_schulz_fn,
    )

    def layouts_of(tree) -> list[tuple[Layout, ...]]:
        return resolve_layouts(
            *(tree, weight_dimension_numbers, weight_splits, param_shardings),
            *(select_axis,),
            neurons=neuron_beta2 is not None,
        )

    def init(params) -> ScaleByDion2State:
        paths, leaves, treedef = leaf_paths(params)
        check_values(paths, leaves)
        layouts = [layout for layout, *_ in layouts_of(params)]
        for p, layout in zip(leaves, layouts, strict=True):
            check_placed(layout, p)
        mu = [_zeros(p, momentum_dtype or p.dtype) for p in leaves]
        nu = None
        if neuron_beta2 is not None:
            nu = treedef.unflatten(
                _zeros(p, jnp.float32, layout.other)
                for p, layout in zip(leaves, layouts, strict=True)
            )
        count = counters_beside(leaves, jnp.zeros((), jnp.int32))
        return ScaleByDion2State(count, treedef.unflatten(mu), nu)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if not isinstance(state, ScaleByDion2State):
            raise TypeError(
                f"expected the ScaleByDion2State that init or the last update "
                f"returned, got {type(state).__name__}: call update(updates, state)"
            )
        paths, momenta, treedef = leaf_paths(state.mu)
        layouts = layouts_of(state.mu)
        check_momenta(paths, momenta, params, momentum_dtype)
        grads = gradients_of(updates, paths, treedef)
        nus = (
            [None] * len(grads) if state.nu is None else treedef.flatten_up_to(state.nu)
        )
        if (state.nu is None) != (neuron_beta2 is None):
            raise ValueError(
                f"the state {'has no' if state.nu is None else 'has'} second moments "
                f"(nu), but neuron_beta2={check.shown(neuron_beta2)}: give the "
                f"neuron_beta2 that the state was made with, or "
                f"state._replace(nu=init(params).nu)"
            )
        results: list = [(None, m, n) for m, n in zip(momenta, nus, strict=True)]
        by_mesh: dict = {}
        for i, (g, (layout, *_)) in enumerate(zip(grads, layouts, strict=True)):
            if isinstance(g, optax.MaskedNode):
                results[i] = (g, momenta[i], nus[i])
            elif g is not None:
                check_gradient(paths[i], momenta[i], g)
                by_mesh.setdefault(layout.mesh, []).append(i)
        real = jnp.result_type(float)  # float64 where it is enabled
        scalars = tuple(
            None if x is None else jnp.asarray(x, real)
            for x in (ef_decay, eps, neuron_beta2)
        )
        for mesh, indices in by_mesh.items():
            plan = make_plan(
                [layouts[i] for i in indices],
                [momenta[i].dtype for i in indices],
                options,
                fraction=fraction,
                selection=selection,
                share_replicas=share_replicas,
                max_exchange_bytes=max_exchange_bytes,
            )
            args = [
                (laid_as(grads[i], layouts[i][0]), momenta[i], nus[i]) for i in indices
            ]
            run = _compiled(mesh, plan, options, tuple(indices))
            done = run(args, (*scalars, state.count))
            for i, result in zip(indices, done, strict=True):
                results[i] = result
        new_updates, mu, nu = zip(*results, strict=True) if results else ((), (), ())
        return treedef.unflatten(new_updates), ScaleByDion2State(
            optax.safe_increment(state.count),
            treedef.unflatten(mu),
            None if state.nu is None else treedef.unflatten(nu),
        )

    return optax.GradientTransformationExtraArgs(init, update)


@functools.lru_cache(maxsize=64)
def _compiled(mesh, plan: Plan, options: Options, positions: tuple[int, ...]):
    """The jitted step of the leaves of one mesh; cached for calls outside of jit."""

    def step(leaves, scalars):
        placed = [
            (*leaf, position) for leaf, position in zip(leaves, positions, strict=True)
        ]
        return dion2_step(plan, options, placed, scalars)

    if mesh is None:
        return jax.jit(step)
    specs = [
        (x.spec, x.spec, _nu_spec(x)) for x, *_ in plan.layouts
    ]  # gradient or update, momentum, second moments
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=specs,
            check_vma=False,  # psum over groups of devices needs it
        )
    )


def _nu_spec(layout: Layout) -> PartitionSpec:
    return PartitionSpec(
        *(
            None if axis in layout.other else (names or None)
            for axis, names in enumerate(layout.names)
        )
    )


def _zeros(p, dtype, flat: tuple[int, ...] = ()) -> jax.Array:
    """Zeros as p lies, of size 1 along the axes `flat`."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if isinstance(p, jax.core.Tracer) or not isinstance(p, jax.Array):
        # Depends on p: plain zeros lose its devices and sharding under jit.
        zeros = jnp.where(p == p, 0, 0).astype(dtype)
        return jnp.max(zeros, axis=flat, keepdims=True, initial=0) if flat else zeros
    shape = tuple(1 if a in flat else n for a, n in enumerate(p.shape))
    # Committed zeros would bind an uncommitted parameter's step to its one device.
    sharding = p.sharding if p.committed else None
    if flat and isinstance(sharding, NamedSharding):
        spec = (None if a in flat else e for a, e in enumerate(sharding.spec))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return jnp.zeros(shape, dtype, device=sharding)


def laid_as(g, layout: Layout):
    """The gradient in the parameter's layout; only Explicit axes refuse another."""
    if layout.mesh is None:
        return g
    g = jnp.asarray(g)
    kinds = dict(zip(layout.mesh.axis_names, layout.mesh.axis_types, strict=True))
    typed = jax.typeof(g).sharding
    explicit = [name for name, kind in kinds.items() if kind == AxisType.Explicit]
    spec = PartitionSpec(
        *(tuple(a for a in names if a in explicit) or None for names in layout.names)
    )
    # Types show Explicit axes alone: to reshard what agrees would gather Auto ones.
    if not explicit or (not typed.mesh.empty and typed.spec == spec):
        return g
    return jax.sharding.reshard(g, NamedSharding(layout.mesh, spec))
