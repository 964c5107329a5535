"""The optimizer by name, its learning-rate schedule, and who takes which parameter."""

import argparse
import inspect

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from lm.errors import UserError


def schedule(peak: float, args: argparse.Namespace):
    """Learning rate by update number: linear warmup, flat, linear decay to zero."""

    def rate(count):
        up = (count + 1) / max(1, args.warmup)
        down = (args.steps - count) / max(1, args.decay)
        return peak * jnp.clip(jnp.minimum(up, down), 0.0, 1.0)

    return rate


def block_matrices(params):
    """Dimension numbers of the kernels inside blocks, [in, out] or stacked
    [layer, in, out]; None for every other leaf: those go to AdamW."""

    def axes(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if "blocks" in name and "kernel" in name:
            return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)
        return None

    return jax.tree.map_with_path(axes, params)


def make_optimizer(args: argparse.Namespace, params):
    """(transformation, table of which parameter it gives to whom, and why).

    Steps whose gradient is not finite change neither parameters nor state; the state's
    `notfinite_count` counts them in a row.
    """
    rate, adam_rate = schedule(args.lr, args), schedule(args.adam_lr, args)
    if args.optimizer in ("dion2", "dion3"):
        import dion2_jax

        matrix = _matrix_arguments(args, params)
        make = dion2_jax.dion3 if args.optimizer == "dion3" else dion2_jax.dion2
        tx = make(rate, args.fraction, adam_learning_rate=adam_rate, **matrix)
        table = str(dion2_jax.describe(params, fraction=args.fraction, **matrix))
    elif args.optimizer == "muon":
        tx = make_muon(rate, adam_rate, args.weight_decay)
        table = _table(params, lambda matrix: "muon" if matrix else "adamw")
    else:
        tx = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=args.weight_decay)
        table = _table(params, lambda matrix: "adamw")
    return optax.apply_if_finite(tx, max_consecutive_errors=2**30), rate, table


def make_muon(rate, adam_rate, weight_decay: float) -> optax.GradientTransformation:
    """optax.contrib.muon with its defaults, for the matrices of the layers.

    Raises:
        UserError: Optax is older than 0.2.7, whose Muon has one rate for all.
    """
    if "adam_learning_rate" not in inspect.signature(optax.contrib.muon).parameters:
        raise UserError(
            f"Muon with another learning rate for AdamW needs optax 0.2.7 or newer, "
            f"found {optax.__version__}: pip install --upgrade optax"
        )
    return optax.contrib.muon(
        rate,
        adam_learning_rate=adam_rate,
        adam_b2=0.95,
        weight_decay=weight_decay,
        adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=block_matrices,
    )


def make_stats(args: argparse.Namespace, params):
    """The `dion2_jax.stats` of the optimizer."""
    import dion2_jax

    return dion2_jax.stats(args.fraction, **_matrix_arguments(args, params))


def _matrix_arguments(args: argparse.Namespace, params) -> dict:
    """Of dion2, but for the rates and the fraction."""
    import dion2_jax

    return dict(
        param_shardings=dion2_jax.shardings_of(params),
        # The default rule knows [in, out] kernels; stacked ones must be declared.
        weight_dimension_numbers=block_matrices if args.scan_layers else None,
        weight_decay=args.weight_decay,
        adam_weight_decay=args.weight_decay,
        **({"neuron_beta2": 0.95} if args.optimizer == "dion3" else {}),
    )


def _table(params, taker) -> str:
    rows = []
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        matrix = "blocks" in name and "kernel" in name
        why = "kernel of a layer" if matrix else "embedding, head or vector"
        shape = f"{leaf.dtype}{list(leaf.shape)}"
        rows.append(
            f"{name.removesuffix('/value'):<32} {shape:<24} {taker(matrix):<6} {why}"
        )
    return "\n".join(rows)
