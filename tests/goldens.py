"""The recorded trajectories of `golden/`, in the orientation of JAX kernels.

The files are output axis first; here a kernel is (*batch, in, out), one with heads is
(in, H, d) with the heads a batch axis, a convolution is (*taps, in, out).
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

GOLDEN = Path(__file__).parent / "golden"


class Tolerances(NamedTuple):
    """How near a correct implementation comes, see golden/README.md; None: not tested.

    momentum, variance: largest difference, relative to the largest recorded entry.
    params: largest absolute difference. update: of one step's change of the parameter,
    relative Frobenius error. cosine: between these changes, at least.
    """

    momentum: float
    params: float | None
    update: float
    cosine: float | None
    variance: float


@dataclass(frozen=True)
class Leaf:
    """One parameter: arrays of T steps, and the axes and shards `step` takes.

    init: [*shape]; grads, params, momentum: [T, *shape]; variance: [T, *shape with
    reduction axes 1] or None. decayed: bool [T, *shape], the entries of momentum that
    the step decayed: of the selected slices, all that were not zero.
    """

    init: np.ndarray
    grads: np.ndarray
    params: np.ndarray
    momentum: np.ndarray
    variance: np.ndarray | None
    decayed: np.ndarray
    reduction: tuple[int, ...]
    output: tuple[int, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Golden:
    """One recorded case.

    args: fraction, ef_decay, selection, ns_coeffs, eps, neuron_beta2 (None for Dion2).
    learning_rates: one a step. dtype: of parameters, gradients and state. uneven: its
    shards differ in size, so no JAX array can lie like this. devices: all of them, with
    the copies of replicated and hybrid layouts.
    """

    name: str
    precision: str
    dtype: str
    args: dict
    learning_rates: tuple[float, ...]
    weight_decay: float
    adjust_lr: str | None
    leaves: tuple[Leaf, ...]
    devices: int
    uneven: bool
    tolerances: Tolerances


def golden_names(families=None, precision=None):
    """Names of the cases of the given families (one or several; None: all), sorted."""
    families = (families,) if isinstance(families, str) else families
    found = []
    for path in sorted(GOLDEN.glob("*.npz")):
        family, *_, last = path.stem.split("__")
        if families is not None and family not in families:
            continue
        if precision is None or precision == last:
            found.append(path.stem)
    return found


def read_golden(name):
    """(meta, arrays) as recorded, output axis first."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    return json.loads(str(arrays.pop("meta"))), arrays


@functools.cache
def load_golden(name):
    """The case of that name, of any family but `scalar_rules`."""
    meta, arrays = read_golden(name)
    hyper, layout = meta["hyperparameters"], meta["layout"]
    rates = meta["lr_schedule"] or [hyper["lr"]] * meta["steps"]
    return Golden(
        name=name,
        precision=meta["precision"],
        dtype=meta["param_dtype"],
        args=dict(
            fraction=hyper["fraction"],
            ef_decay=hyper["mu" if meta["optimizer"] == "nordion2" else "ef_decay"],
            selection=hyper["selection_scope"],
            ns_coeffs="polar_express" if hyper["polar_express"] else "classic",
            eps=hyper["epsilon"],
            neuron_beta2=hyper.get("muon_beta2"),
        ),
        learning_rates=tuple(rates),
        weight_decay=hyper["weight_decay"],
        adjust_lr=hyper["adjust_lr"],
        leaves=tuple(read_leaf(meta, arrays, i) for i in range(meta["num_params"])),
        devices=layout["world_size"] * layout.get("replicas", 1),
        uneven=any(len(set(held)) > 1 for held in layout["shard_sizes"] or ()),
        tolerances=tolerances(meta),
    )


def read_leaf(meta, arrays, i):
    hyper, layout = meta["hyperparameters"], meta["layout"]
    shape = meta["shapes"][i]
    shards = [1] * len(shape)
    if layout["kind"] == "shard":
        shards[layout["shard_dim"]] = layout["world_size"]
    view = recorded_view(shape, hyper)
    ndim = len(view)
    output = (ndim - 1,)
    if hyper["flatten"]:  # (out, in, *taps)
        order = (*range(2, ndim), 1, 0)
        reduction = tuple(range(ndim - 1))
    elif view != shape:  # (H, d, in): whole heads are sharded
        order = (2, 0, 1)
        reduction = (0,)
        shards = [shards[0], 1, shards[1]]
    else:  # (*batch, out, in)
        order = (*range(ndim - 2), ndim - 1, ndim - 2)
        reduction = (ndim - 2,)

    def turn(x):
        """[..., *shape] (variance: one wide along the inputs) -> JAX orientation."""
        lead = x.ndim - len(shape)
        width = [1] if x.shape[-1] == 1 else view[-1:]
        x = x.reshape(*x.shape[:lead], *view[:-1], *width)
        return x.transpose(*range(lead), *(lead + axis for axis in order))

    grads, momentum = arrays[f"grads_{i}"], arrays[f"momentum_{i}"]
    before = np.concatenate([np.zeros_like(momentum[:1]), momentum[:-1]])
    variance = arrays.get(f"variance_{i}")
    dtype = ml_dtypes.bfloat16 if meta["param_dtype"] == "bfloat16" else np.float32
    kept = (before.astype(dtype) + grads.astype(dtype)).astype(np.float32)
    return Leaf(
        init=turn(arrays[f"init_{i}"]),
        grads=turn(grads),
        params=turn(arrays[f"params_{i}"]),
        momentum=turn(momentum),
        variance=None if variance is None else turn(variance),
        decayed=turn(momentum != kept),
        reduction=reduction,
        output=output,
        shards=tuple(shards[axis] for axis in order),
    )


def recorded_view(shape, hyper):
    """The recorded shape with the heads as an axis of their own: (H, d, in)."""
    heads = hyper["num_heads"] or 1
    return shape if heads == 1 else [heads, shape[0] // heads, shape[1]]


def tolerances(meta):
    if meta["precision"] == "float32_ns":
        return Tolerances(1e-6, 1e-5, 1e-4, None, 1e-4)
    momentum = 1e-2 if meta["param_dtype"] == "bfloat16" else 1e-6
    return Tolerances(momentum, None, 0.30, 0.955, 0.4)
