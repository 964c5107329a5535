"""Dion2 and NorDion2 on whole matrices, in float64: slow, obvious, the oracle.

Nothing is sharded here. A shard is a set of slices of the whole matrix, and all that
sharding changes is which slices compete with which, and over which of them NorDion2
takes its norms. The words are the package's: an array has batch, reduction and output
axes; a slice is one index of the selected group; sizes are R (reduction) by O (output).
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

POLAR_EXPRESS = (  # arXiv 2505.16932, five iterations, safety factor 1.02 built in
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
CLASSIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
MUON = ((3.4445, -4.7750, 2.0315),)
PRESETS = {"polar_express": POLAR_EXPRESS, "classic": CLASSIC, "muon": MUON}


class Step(NamedTuple):
    """What one step makes of one parameter.

    update: the orthogonalized selected slices in place, zero elsewhere, [*shape].
    mu: momentum, decayed on the selected slices, [*shape].
    nu: NorDion2's variance, [*shape with reduction axes 1], or None.
    selected: bool [*batch, n], n flat over the selected group; with splits a tuple of
        them, one a block.
    """

    update: np.ndarray
    mu: np.ndarray
    nu: np.ndarray | None
    selected: np.ndarray | tuple[np.ndarray, ...]


# --- axes: any array is a stack of matrices [B, R, O] ---------------------------------


def axis_groups(ndim, reduction, output):
    """The (batch, reduction, output) axes of an array, as three tuples."""
    reduction, output = (
        tuple(axis % ndim for axis in ((group,) if isinstance(group, int) else group))
        for group in (reduction, output)
    )
    assert len({*reduction, *output}) == len(reduction) + len(output), (
        "axis named twice"
    )
    batch = tuple(a for a in range(ndim) if a not in reduction + output)
    return batch, reduction, output


def sizes(shape, axes):
    return tuple(shape[a] for a in axes)


def to_matrices(x, groups):
    """[*shape] -> a new [B, R, O], each group flat in the order of its axes."""
    x = np.array(x, np.float64)
    flat = [math.prod(sizes(x.shape, group)) for group in groups]
    return x.transpose(sum(groups, ())).reshape(flat)


def from_matrices(matrices, shape, groups):
    """[B, R, O] -> [*shape], the inverse of `to_matrices`."""
    order = sum(groups, ())
    return matrices.reshape(sizes(shape, order)).transpose(np.argsort(order))


# --- selection ------------------------------------------------------------------------


def shard_slices(group_sizes, group_shards):
    """The flat slices of a group that each shard holds: a list of index arrays.

    Along an axis of size n in p shards, shard i holds [i * w, (i + 1) * w) up to n,
    with w = ceil(n / p): the last ones may be short or empty.
    """
    index = np.arange(math.prod(group_sizes)).reshape(group_sizes)
    shards = []
    for place in itertools.product(*map(range, group_shards)):
        box = []
        for i, n, p in zip(place, group_sizes, group_shards, strict=True):
            width = math.ceil(n / p)
            box.append(slice(i * width, (i + 1) * width))
        shards.append(index[tuple(box)].ravel())
    return shards


def slice_count(fraction, n):
    """How many of n slices are selected: max(1, ceil(fraction * n)) in doubles."""
    return max(1, math.ceil(fraction * n))


def select_slices(scores, shards, fraction):
    """The heaviest slices of each shard, ties to the lower index: bool [n].

    Every shard takes the same number, counted from the largest shard, or all it has.
    """
    k = slice_count(fraction, max(len(own) for own in shards))
    selected = np.zeros(len(scores), bool)
    for own in shards:
        heaviest_first = own[np.argsort(-scores[own], kind="stable")]
        selected[heaviest_first[:k]] = True
    return selected


def select_group(shape, groups, shards, select_axis="sharded", neurons=False):
    """Which matrix group is selected along: "reduction" or "output"."""
    _, reduction, output = groups
    size_r, size_o = (math.prod(sizes(shape, group)) for group in (reduction, output))
    p_r, p_o = (math.prod(sizes(shards, group)) for group in (reduction, output))
    shorter = "output" if size_o <= size_r else "reduction"
    if select_axis == "sharded":
        if neurons:
            chosen = "output"
        elif p_r == p_o:
            chosen = shorter
        else:
            chosen = "output" if p_o > p_r else "reduction"
    elif select_axis == "shorter":
        chosen = shorter
    elif select_axis in ("output", "reduction"):
        chosen = select_axis
    else:
        raise ValueError(f"unknown select_axis {select_axis!r}")
    if neurons and chosen == "reduction":
        raise ValueError("neuron-wise normalization selects along the output axis only")
    return chosen


# --- one matrix -----------------------------------------------------------------------


def newton_schulz(x, coeffs="polar_express", steps=5, eps=1e-8):
    """The polynomial iteration on one matrix [r, c]."""
    scale = 1.02 if isinstance(coeffs, str) and coeffs == "polar_express" else 1.0
    x = x / (scale * np.linalg.norm(x) + eps)
    for a, b, c in coefficient_rows(coeffs, steps):
        if x.shape[0] <= x.shape[1]:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        else:
            gram = x.T @ x
            x = a * x + x @ (b * gram + c * gram @ gram)
    return x


def coefficient_rows(coeffs, steps):
    """One (a, b, c) an iteration.

    A preset is cut, or its last row repeated; of a table only a single row is repeated.
    """
    preset = isinstance(coeffs, str)
    rows = list(PRESETS[coeffs]) if preset else np.atleast_2d(coeffs).tolist()
    if not preset and len(rows) not in (1, steps):
        raise ValueError(f"{len(rows)} rows of coefficients for {steps} steps")
    return (rows + rows[-1:] * steps)[:steps]


def normalize_neurons(u, nu, beta2, shards):
    """NorDion2: even out the neurons of u [R, k], keeping each shard's norm.

    nu [k] is the variance of these neurons; shards is a list of bool [k]. Returns the
    new u and nu.
    """
    mean_square = (u**2).sum(axis=0) / max(1, len(u))
    nu = beta2 * nu + (1 - beta2) * mean_square
    even = u / (np.sqrt(nu) + 1e-8)
    for own in shards:
        before = np.linalg.norm(u[:, own])
        after = max(np.linalg.norm(even[:, own]), 1e-8)
        even[:, own] *= before / after
    return even, nu


# --- one parameter --------------------------------------------------------------------


def step(
    grad,
    mu,
    *,
    reduction,
    output,
    shards=None,
    fraction=0.25,
    ef_decay=0.95,
    selection="local",
    select_axis="sharded",
    score="l1",
    scores=None,
    ns_coeffs="polar_express",
    ns_steps=5,
    eps=1e-8,
    orthogonalize=None,
    nu=None,
    neuron_beta2=None,
    splits=None,
):
    """One step of one parameter; see `Step` for what comes out.

    Args:
        grad, mu: [*shape], any rank.
        reduction, output: an axis or a tuple of axes; every other axis is a batch axis.
        shards: number of shards along every axis of the array; None: one.
        fraction, ef_decay, select_axis, ns_coeffs, ns_steps, eps: as in the package.
        selection: "local": every shard of the selected group takes its own heaviest
            slices. "global": the whole matrix is one shard.
        score: "l1" or "l2" (sum of squares), over the whole other group.
        scores: [*batch, n], used in place of the computed scores; with splits a list,
            one a block.
        orthogonalize: f([r, c]) -> [r, c], r along reduction; None: Newton-Schulz.
        nu: [*shape with reduction axes 1]; None: zeros.
        neuron_beta2: a number turns on NorDion2's normalization.
        splits: sizes of the blocks along the flat output group, each its own matrix.
    """
    options = dict(
        fraction=fraction,
        ef_decay=ef_decay,
        selection=selection,
        select_axis=select_axis,
        score=score,
        ns_coeffs=ns_coeffs,
        ns_steps=ns_steps,
        eps=eps,
        orthogonalize=orthogonalize,
        neuron_beta2=neuron_beta2,
    )
    assert selection in ("local", "global") and score in ("l1", "l2")
    shape = np.shape(grad)
    assert np.shape(mu) == shape, f"momentum {np.shape(mu)}, gradient {shape}"
    groups = axis_groups(len(shape), reduction, output)
    batch, reduction, output = groups
    shards = tuple(shards) if shards is not None else (1,) * len(shape)
    assert len(shards) == len(shape), f"{len(shards)} shard counts, {len(shape)} axes"
    nu_shape = tuple(1 if a in reduction else n for a, n in enumerate(shape))
    neurons = neuron_beta2 is not None
    if neurons and nu is None:
        nu = np.zeros(nu_shape)
    if splits is not None:
        return split_step(grad, mu, nu, groups, shards, splits, scores, options)

    group = select_group(shape, groups, shards, select_axis, neurons)
    selected_axes = output if group == "output" else reduction
    axis = 1 if group == "output" else 0  # of one matrix [R, O]
    competing = shard_slices(sizes(shape, selected_axes), sizes(shards, selected_axes))
    if selection == "global":
        competing = [np.arange(sum(map(len, competing)))]
    if orthogonalize is None:

        def orthogonalize(x):
            return newton_schulz(x, ns_coeffs, ns_steps, eps)

    mu = to_matrices(mu, groups) + to_matrices(grad, groups)
    nu = to_matrices(nu, groups) if neurons else None
    update = np.zeros_like(mu)
    selected = np.zeros((len(mu), mu.shape[1 + axis]), bool)
    if scores is None:
        weights = abs(mu) if score == "l1" else mu**2
        scores = weights.sum(axis=2 - axis)
    scores = np.asarray(scores, np.float64).reshape(selected.shape)

    for b, matrix in enumerate(mu):
        selected[b] = select_slices(scores[b], competing, fraction)
        chosen = np.flatnonzero(selected[b])
        u = orthogonalize(np.take(matrix, chosen, axis))
        if neurons:
            own = [np.isin(chosen, shard) for shard in competing]
            u, nu[b, 0, chosen] = normalize_neurons(
                u, nu[b, 0, chosen], neuron_beta2, own
            )
        here = (slice(None), chosen) if group == "output" else (chosen, slice(None))
        update[b][here] = u
        mu[b][here] *= ef_decay

    return Step(
        from_matrices(update, shape, groups),
        from_matrices(mu, shape, groups),
        from_matrices(nu, nu_shape, groups) if neurons else None,
        selected.reshape(*sizes(shape, batch), selected.shape[1]),
    )


def split_step(grad, mu, nu, groups, shards, splits, scores, options):
    """Cut the blocks out, step each as a parameter of its own, put them back."""
    batch, reduction, output = groups
    while len(output) > 1 and np.shape(grad)[output[0]] == 1:  # an axis of no matter
        batch, output = batch + output[:1], output[1:]
    order = batch + reduction + output
    lead = len(batch + reduction)
    out_sizes, out_shards = sizes(np.shape(grad), output), sizes(shards, output)
    if sum(splits) != math.prod(out_sizes):
        raise ValueError(f"splits {splits} do not sum to {math.prod(out_sizes)}")
    if math.prod(out_shards) == 1:  # then blocks may lie anywhere in the flat group
        out_sizes, out_shards = (math.prod(out_sizes),), (1,)
    width = math.prod(out_sizes[1:])  # of one index of the group's first axis
    if any(size % width for size in splits):
        raise ValueError(
            f"splits {splits} of a sharded group: not multiples of {width}"
        )

    def cut(x):  # [*shape] -> blocks [*batch, *reduction, size / width, ...]
        x = np.asarray(x, np.float64).transpose(order)
        x = x.reshape(*x.shape[:lead], sum(splits) // width, *out_sizes[1:])
        return np.split(x, np.cumsum(splits[:-1]) // width, axis=lead)

    def join(blocks, shape):
        whole = np.concatenate(blocks, axis=lead)
        return whole.reshape(sizes(shape, order)).transpose(np.argsort(order))

    steps = [
        step(
            block_grad,
            block_mu,
            reduction=range(len(batch), lead),
            output=range(lead, lead + len(out_sizes)),
            shards=sizes(shards, batch + reduction) + out_shards,
            nu=block_nu,
            scores=block_scores,
            **options,
        )
        for block_grad, block_mu, block_nu, block_scores in zip(
            cut(grad),
            cut(mu),
            [None] * len(splits) if nu is None else cut(nu),
            [None] * len(splits) if scores is None else scores,
            strict=True,
        )
    ]
    return Step(
        join([s.update for s in steps], np.shape(grad)),
        join([s.mu for s in steps], np.shape(grad)),
        None if nu is None else join([s.nu for s in steps], np.shape(nu)),
        tuple(s.selected for s in steps),
    )


# --- the optimizer --------------------------------------------------------------------


def shape_factor(fan_out, fan_in, adjust_lr):
    """What `adjust_lr` multiplies the learning rate of one matrix by."""
    if adjust_lr == "spectral_norm":
        return math.sqrt(fan_out / fan_in)
    if adjust_lr == "rms_norm":
        return 0.2 * math.sqrt(max(fan_out, fan_in))
    assert adjust_lr is None, adjust_lr
    return 1.0


def dion2_step(
    param,
    grad,
    mu,
    *,
    learning_rate,
    weight_decay=0.01,
    adjust_lr="spectral_norm",
    adjust_fraction=False,
    **step_args,
):
    """One step of the whole optimizer: (param, Step).

    Weight decay acts on every entry, with the learning rate before the shape factor;
    then the selected slices move. `adjust_fraction` multiplies the factor by
    1 / sqrt(fraction). The rest of the arguments are those of `step`.
    """
    param = np.asarray(param, np.float64)
    result = step(grad, mu, **step_args)
    groups = axis_groups(param.ndim, step_args["reduction"], step_args["output"])
    _, reduction, output = groups
    fan_in = math.prod(sizes(param.shape, reduction))
    fan_out = math.prod(sizes(param.shape, output))
    blocks = step_args.get("splits") or (fan_out,)
    factor = np.repeat([shape_factor(n, fan_in, adjust_lr) for n in blocks], blocks)
    if adjust_fraction:
        factor = factor / math.sqrt(step_args.get("fraction", 0.25))
    one_each = tuple(n if a in output else 1 for a, n in enumerate(param.shape))
    factor = from_matrices(factor[None, None], one_each, groups)
    param = param * (1 - learning_rate * weight_decay)
    return param - learning_rate * factor * result.update, result
