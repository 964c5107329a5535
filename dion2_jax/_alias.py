"""dion2: scale_by_dion2 for matrices, AdamW for the rest."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dion2_jax import _arguments as check
from dion2_jax._leaves import (
    check_floating,
    check_gradient,
    check_values,
    gradients_of,
    is_bool,
    is_dimensions,
    is_splits,
)
from dion2_jax._matrices import matrix_dimension_numbers
from dion2_jax._scaling import ADJUST_LR, scale_by_shape
from dion2_jax._sharding import counters_beside
from dion2_jax._transform import SCALE_BY_DION2_STATIC_ARGS, scale_by_dion2
from dion2_jax._trees import leaf_paths, name_of, resolve_entries

STATIC_ARGS = (
    *SCALE_BY_DION2_STATIC_ARGS,
    *("adjust_lr", "adjust_fraction", "weight_decay_mask"),
)


def dion2(
    learning_rate: optax.ScalarOrSchedule,
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
    adjust_lr: str | None = "spectral_norm",
    adjust_fraction: bool = False,
    weight_decay: jax.typing.ArrayLike = 0.01,
    weight_decay_mask=None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike = 0.01,
) -> optax.GradientTransformationExtraArgs:
    """Dion2 for matrices, AdamW for all other parameters.

    One step of a matrix X with update U is X <- X - lr (factor U + weight_decay X),
    which equals the reference's order of operations.

    Arguments that are not listed here are as in `scale_by_dion2`.

    Args:
        learning_rate: a number or a schedule.
        fraction: share of the slices of every matrix selected, in (0, 1]; the paper's
            alpha.
        ef_decay: decay of the selected slices of momentum; the paper's mu.
        weight_dimension_numbers: as in `scale_by_dion2`; where an entry is None, the
            leaf goes to AdamW. None: `matrix_dimension_numbers`.
        adjust_lr: factor of the update by the whole matrix' shape: "spectral_norm":
            sqrt(fan_out / fan_in); "rms_norm": 0.2 sqrt(max(fan_out, fan_in)); None.
            Of a fused leaf, by every block's shape.
        adjust_fraction: also multiply by 1 / sqrt(fraction): weight decay acts on all
            slices at every step, the update only on a fraction of them.
        weight_decay: of the matrices, times the learning rate.
        weight_decay_mask: True or False per leaf, which matrices decay: tree, prefix,
            or a function of the parameters. None: all.
        adam_learning_rate: of AdamW; None: the same.
        adam_b1, adam_b2, adam_eps, adam_weight_decay: of AdamW.

    Returns:
        An `optax.GradientTransformationExtraArgs`.

    Raises:
        ValueError, TypeError: as in `scale_by_dion2`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> params = {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}
        >>> tx = dion2(1e-2)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> jax.tree.map(jnp.shape, optax.apply_updates(params, updates))
        {'bias': (6,), 'kernel': (4, 6)}

    References:
        Ahn, Amsel, Langford: Dion2, 2025, https://arxiv.org/abs/2512.16928.
    """
    fraction = check.check_fraction(fraction, "STATIC_ARGS")
    check.check_choice("adjust_lr", adjust_lr, ADJUST_LR)
    check.check_bool("adjust_fraction", adjust_fraction)
    weight_decay = check.check_number("weight_decay", weight_decay)
    adam_b1 = check.check_number("adam_b1", adam_b1, below=1.0)
    adam_b2 = check.check_number("adam_b2", adam_b2, below=1.0)
    adam_eps = check.check_number("adam_eps", adam_eps)
    adam_weight_decay = check.check_number("adam_weight_decay", adam_weight_decay)
    learning_rate = check.check_rate("learning_rate", learning_rate)
    if adam_learning_rate is not None:
        adam_learning_rate = check.check_rate("adam_learning_rate", adam_learning_rate)
    rule = weight_dimension_numbers
    if rule is None:
        rule = matrix_dimension_numbers
    arguments = dict(
        selection=selection,
        select_axis=select_axis,
        score=score,
        seed=seed,
        ns_coeffs=ns_coeffs,
        ns_steps=ns_steps,
        ns_method=ns_method,
        ns_dtype=ns_dtype,
        newton_schulz_fn=newton_schulz_fn,
        eps=eps,
        mu_dtype=mu_dtype,
        neuron_beta2=neuron_beta2,
        param_shardings=param_shardings,
        share_replicas=share_replicas,
        max_exchange_bytes=max_exchange_bytes,
    )
    scale_by_dion2(fraction, ef_decay, **arguments)  # checks the arguments now

    def transformation(tree):
        """The optimizer for a tree, and who takes every leaf.

        Made for the whole tree: its rule may need leaves that the halves mask.
        """
        paths, leaves, treedef = leaf_paths(tree)
        check_floating(paths, leaves)
        check_values(paths, leaves)
        entries = resolve_entries("weight_dimension_numbers", rule, tree, is_dimensions)
        splits = resolve_entries("weight_splits", weight_splits, tree, is_splits)
        decays = resolve_entries("weight_decay_mask", weight_decay_mask, tree, is_bool)
        for path, entry, blocks in zip(paths, entries, splits, strict=True):
            if blocks and not entry:
                raise ValueError(
                    f"weight_splits has {blocks} for the parameter {name_of(path)!r}, "
                    f"which AdamW takes: name its axes in weight_dimension_numbers, or "
                    f"leave its blocks out"
                )
        decays = [True if decay is None else decay for decay in decays]
        rows = zip(entries, splits, decays, strict=True)
        known = dict(zip(paths, rows, strict=True))

        def known_of(part):
            paths = leaf_paths(part)[0]
            unknown = [name_of(path) for path in paths if path not in known]
            if unknown:
                names = ", ".join(map(name_of, list(known)[:5]))
                raise ValueError(
                    f"the optimizer's state has a matrix {unknown[0]!r} that the "
                    f"parameters have not: they have {names}. "
                    f"Give update the tree that init got; of an nnx.State take "
                    f"nnx.as_pure for both"
                )
            return [known[path] for path in paths]

        def entry_tree(index):
            return lambda part: leaf_paths(part)[2].unflatten(
                [row[index] for row in known_of(part)]
            )

        labels = ["dion2" if entry else "adam" for entry in entries]

        matrices = optax.chain(
            scale_by_dion2(
                *(fraction, ef_decay),
                weight_dimension_numbers=entry_tree(0),
                weight_splits=entry_tree(1),
                **arguments,
            ),
            scale_by_shape(
                known_of, adjust_lr, fraction**-0.5 if adjust_fraction else 1.0
            ),
            optax.add_decayed_weights(weight_decay, entry_tree(2)),
            optax.scale_by_learning_rate(learning_rate),
        )
        rest = optax.adamw(
            learning_rate if adam_learning_rate is None else adam_learning_rate,
            *(adam_b1, adam_b2, adam_eps),
            weight_decay=adam_weight_decay,
        )
        halves = {"dion2": _stable(matrices), "adam": _stable(rest)}
        return optax.partition(halves, lambda _: treedef.unflatten(labels)), labels

    def init(params):
        return counters_beside(params, transformation(params)[0].init(params))

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "dion2 decays weights and needs the parameters: call "
                "update(updates, state, params)"
            )
        if not isinstance(state, optax.PartitionState):
            raise TypeError(
                f"expected the state that init or the last update returned, got "
                f"{type(state).__name__}: call update(updates, state, params)"
            )
        tx, labels = transformation(params)
        paths, leaves, treedef = leaf_paths(params)
        grads = gradients_of(updates, paths, treedef)
        absent = [g is None or isinstance(g, optax.MaskedNode) for g in grads]
        for path, p, g, skip in zip(paths, leaves, grads, absent, strict=True):
            if not skip:
                check_gradient(path, p, g)
        if not any(absent):
            return tx.update(updates, state, params, **extra_args)
        # The rest of Optax wants every gradient: zeros, and what they did is undone.
        filled = [
            jnp.zeros_like(p) if skip else g
            for p, g, skip in zip(leaves, grads, absent, strict=True)
        ]
        new, after = tx.update(treedef.unflatten(filled), state, params, **extra_args)
        new = [
            g if skip else u
            for u, g, skip in zip(
                treedef.flatten_up_to(new), grads, absent, strict=True
            )
        ]
        return treedef.unflatten(new), _kept(after, state, labels, absent, treedef)

    return optax.GradientTransformationExtraArgs(init, update)


def _kept(after, before, labels: list[str], absent: list[bool], treedef):
    """The state `after`, but `before` for the parameters whose gradient is absent.

    What belongs to the parameters of a half are the subtrees of its state that have
    their structure.
    """
    halves = {}
    for half, new in after.inner_states.items():
        kept = treedef.unflatten(
            skip if label == half else optax.MaskedNode()
            for label, skip in zip(labels, absent, strict=True)
        )
        structure = jax.tree.structure(kept)
        same = lambda x, like=structure: jax.tree.structure(x) == like  # noqa: E731

        def choose(x, old, kept=kept, same=same):
            if not same(x):
                return x
            return jax.tree.map(lambda k, n, o: o if k else n, kept, x, old)

        halves[half] = jax.tree.map(
            choose, new, before.inner_states[half], is_leaf=same
        )
    return after._replace(inner_states=halves)


def _stable(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` with updates of the gradients' dtypes, and the state's those after init.

    Plain AdamW's drift with bfloat16 parameters and float32 gradients or learning
    rates, and cost a second compilation; weight decay takes the parameters' dtype.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        strong = lambda x: jnp.asarray(x, x.dtype)  # noqa: E731
        return jax.tree.map(strong, tx.init(params))

    def update(updates, state, params=None, **extra_args):
        new, after = tx.update(updates, state, params, **extra_args)
        dtype = jax.dtypes.canonicalize_dtype  # NumPy's float64 is float32 to JAX
        keep = lambda x, like: x.astype(dtype(like.dtype))  # noqa: E731
        return jax.tree.map(keep, new, updates), jax.tree.map(keep, after, state)

    return optax.GradientTransformationExtraArgs(init, update)
