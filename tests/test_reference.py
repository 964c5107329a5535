"""The oracle against the recorded trajectories, and against a second formulation."""

import itertools
import math

import numpy as np
import optax
import pytest
from goldens import golden_names, load_golden, read_golden
from reference import (
    PRESETS,
    axis_groups,
    coefficient_rows,
    dion2_step,
    newton_schulz,
    select_group,
    shape_factor,
    shard_slices,
    slice_count,
    step,
)

CASES = [name for name in golden_names() if not name.startswith("scalar_rules")]


def relative(found, expected):
    """Largest difference relative to the largest expected entry."""
    return abs(found - expected).max() / max(abs(expected).max(), 1e-30)


def cosine(x, y):
    return np.vdot(x, y) / (np.linalg.norm(x) * np.linalg.norm(y))


def spread(selected, shape, groups, group):
    """`Step.selected` for the entries of the parameter: broadcasts to [*shape]."""
    batch, reduction, output = groups
    axes, other = (output, reduction) if group == "output" else (reduction, output)
    selected = selected.reshape([shape[a] for a in batch + axes])
    return np.expand_dims(selected.transpose(np.argsort(batch + axes)), other)


# --- recorded trajectories ------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    case = load_golden(name)
    tolerances = case.tolerances
    neurons = case.args["neuron_beta2"] is not None
    # Under global selection the reference rescales every shard by itself; the oracle
    # rescales the matrix. Selection, momentum and variance do not depend on it.
    own_rescale = neurons and case.args["selection"] == "global"
    for leaf in case.leaves:
        shape = leaf.init.shape
        layout = dict(reduction=leaf.reduction, output=leaf.output, shards=leaf.shards)
        groups = axis_groups(len(shape), leaf.reduction, leaf.output)
        group = select_group(shape, groups, leaf.shards, neurons=neurons)
        recorded = [leaf.init.astype(np.float64), *leaf.params.astype(np.float64)]
        param, mu, nu = leaf.init, np.zeros(shape), None
        for t, learning_rate in enumerate(case.learning_rates):
            if case.dtype == "bfloat16" and t > 0:  # its roundings add up: step from it
                param, mu = leaf.params[t - 1], leaf.momentum[t - 1]
                nu = leaf.variance[t - 1] if neurons else None
            total = mu + leaf.grads[t].astype(np.float64)
            before = param
            param, result = dion2_step(
                param,
                leaf.grads[t],
                mu,
                learning_rate=learning_rate,
                weight_decay=case.weight_decay,
                adjust_lr=case.adjust_lr,
                nu=nu,
                **layout,
                **case.args,
            )
            mu, nu = result.mu, result.nu
            selected = spread(result.selected, shape, groups, group)
            np.testing.assert_array_equal(selected & (total != 0), leaf.decayed[t])
            assert relative(mu, leaf.momentum[t]) <= tolerances.momentum
            if neurons:
                assert relative(nu, leaf.variance[t]) <= tolerances.variance
            if own_rescale:
                continue
            moved, expected = param - before, recorded[t + 1] - recorded[t]
            error = np.linalg.norm(moved - expected)
            assert error <= tolerances.update * np.linalg.norm(expected)
            if tolerances.params is not None:
                assert abs(param - recorded[t + 1]).max() <= tolerances.params
            if tolerances.cosine is not None and expected.any():
                assert cosine(moved, expected) > tolerances.cosine


@pytest.mark.parametrize(
    "name", [n for n in CASES if n.startswith("dist_nordion2") and "_global_" in n]
)
def test_golden_of_global_neurons_differs_by_one_factor_a_shard(name):
    case = load_golden(name)
    direction = {"float32_ns": 1 - 1e-8, "bf16_ns": 0.955}[case.precision]
    largest_factor = 1.0
    for leaf in case.leaves:
        fan_in, fan_out = leaf.init.shape
        mu, nu, before = np.zeros(leaf.init.shape), None, leaf.init
        for t, learning_rate in enumerate(case.learning_rates):
            result = step(
                leaf.grads[t],
                mu,
                nu=nu,
                reduction=leaf.reduction,
                output=leaf.output,
                shards=leaf.shards,
                **case.args,
            )
            mu, nu = result.mu, result.nu
            before = before.astype(np.float64) * (1 - learning_rate * case.weight_decay)
            rate = learning_rate * shape_factor(fan_out, fan_in, case.adjust_lr)
            expected = (before - leaf.params[t]) / rate
            before = leaf.params[t]
            for own in shard_slices((fan_out,), leaf.shards[1:]):
                found, wanted = result.update[:, own], expected[:, own]
                if not found.any():
                    assert abs(wanted).max(initial=0) < 1e-5
                    continue
                assert cosine(found, wanted) > direction
                factor = np.linalg.norm(wanted) / np.linalg.norm(found)
                largest_factor = max(largest_factor, factor, 1 / factor)
    assert 1.01 < largest_factor < 2


@pytest.mark.parametrize("name", golden_names("scalar_rules"))
def test_scalar_rules_are_those_of_optax(name):
    meta, arrays = read_golden(name)
    b1, b2 = meta["betas"]
    decay = meta["weight_decay"]
    if meta["algorithm"] == "adamw":
        epsilon = meta["epsilon"]
        tx = optax.adamw(meta["lr"], b1, b2, eps=epsilon, weight_decay=decay)
    else:
        tx = optax.lion(meta["lr"], b1, b2, weight_decay=decay)
    for i in range(meta["num_params"]):
        params = arrays[f"init_{i}"]
        state = tx.init(params)
        for t in range(meta["steps"]):
            updates, state = tx.update(arrays[f"grads_{i}"][t], state, params)
            params = optax.apply_updates(params, updates)
            assert abs(params - arrays[f"params_{i}"][t]).max() < 1e-6
            mu = optax.tree.get(state, "mu")
            assert relative(mu, arrays[f"momentum_{i}"][t]) < 1e-6
            if meta["algorithm"] == "adamw":
                nu = optax.tree.get(state, "nu")
                assert relative(nu, arrays[f"variance_{i}"][t]) < 1e-6


# --- selection ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "n", "k"),
    [
        (0.25, 16, 4),
        (0.25, 17, 5),
        (0.01, 24, 1),
        (0.07, 100, 8),  # 0.07 * 100 is 7.000000000000001
        (0.35, 17, 6),
        (0.35, 20, 7),
        (1.0, 5, 5),
        (1, 5, 5),
        (0.5, 1, 1),
        (0.5, 0, 1),
    ],
)
def test_slice_count(fraction, n, k):
    assert slice_count(fraction, n) == k


@pytest.mark.parametrize(
    ("n", "p", "held"),
    [
        (18, 8, [3, 3, 3, 3, 3, 3, 0, 0]),
        (10, 4, [3, 3, 3, 1]),
        (5, 4, [2, 2, 1, 0]),
        (3, 4, [1, 1, 1, 0]),
        (16, 4, [4, 4, 4, 4]),
    ],
)
def test_shards_are_contiguous_and_may_be_short_or_empty(n, p, held):
    shards = shard_slices((n,), (p,))
    assert [len(own) for own in shards] == held
    assert np.concatenate(shards).tolist() == list(range(n))


def test_shards_of_a_group_of_axes():
    shards = shard_slices((2, 4), (1, 2))  # every head's dimension is halved
    assert [own.tolist() for own in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    shards = shard_slices((2, 2), (2, 2))
    assert [own.tolist() for own in shards] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("shape", "shards", "select_axis", "neurons", "group"),
    [  # kernels (in, out)
        ((8, 6), (1, 1), "sharded", False, "output"),
        ((6, 8), (1, 1), "sharded", False, "reduction"),
        ((8, 8), (1, 1), "sharded", False, "output"),
        ((8, 6), (2, 1), "sharded", False, "reduction"),
        ((6, 8), (1, 2), "sharded", False, "output"),
        ((8, 64), (2, 4), "sharded", False, "output"),
        ((64, 8), (4, 2), "sharded", False, "reduction"),
        ((64, 8), (2, 2), "sharded", False, "output"),
        ((8, 64), (2, 2), "sharded", False, "reduction"),
        ((8, 8), (2, 2), "sharded", False, "output"),
        ((8, 6), (2, 1), "shorter", False, "output"),
        ((6, 8), (1, 2), "shorter", False, "reduction"),
        ((8, 8), (2, 1), "shorter", False, "output"),
        ((6, 8), (2, 1), "output", False, "output"),
        ((8, 6), (1, 2), "reduction", False, "reduction"),
        ((6, 8), (2, 1), "sharded", True, "output"),
        ((8, 6), (1, 1), "shorter", True, "output"),
        ((6, 8), (1, 1), "shorter", True, ValueError),
        ((8, 6), (1, 1), "reduction", True, ValueError),
        ((8, 6), (1, 1), "rows", False, ValueError),
    ],
)
def test_select_group(shape, shards, select_axis, neurons, group):
    groups = axis_groups(2, 0, 1)
    if group is ValueError:
        with pytest.raises(ValueError):
            select_group(shape, groups, shards, select_axis, neurons)
    else:
        assert select_group(shape, groups, shards, select_axis, neurons) == group


# (shape, reduction, output, shards)
LAYOUTS = [
    ((6, 9), 0, 1, (1, 1)),
    ((9, 6), 0, -1, (1, 1)),
    ((7, 10), 0, 1, (1, 4)),
    ((10, 7), 0, 1, (4, 1)),
    ((3, 7), 0, 1, (2, 8)),
    ((8, 12), 0, 1, (2, 4)),
    ((2, 5, 6), 1, 2, (1, 1, 3)),
    ((5, 3, 4), 0, 2, (1, 3, 2)),  # heads are a batch axis
    ((6, 2, 4), 0, (1, 2), (1, 2, 2)),
    ((6, 2, 4), 0, (2, 1), (1, 1, 2)),  # flat in the order named
    ((2, 4, 6), (0, 1), 2, (1, 4, 2)),
    ((2, 3, 3, 4, 5), (1, 2, 3), 4, (2, 1, 1, 2, 1)),
]


def naively_selected(m, reduction, output, shards, group, fraction, selection, score):
    """Entry by entry: {(batch index, flat slice)}. A slice is in when fewer than k of
    its shard are heavier, or as heavy and earlier."""
    groups = axis_groups(m.ndim, reduction, output)
    batch, axes = groups[0], groups[2 if group == "output" else 1]
    weight = {}
    for index in np.ndindex(m.shape):
        b, place = (tuple(index[a] for a in g) for g in (batch, axes))
        entry = float(m[index])
        entry = abs(entry) if score == "l1" else entry * entry
        weight[b, place] = weight.get((b, place), 0.0) + entry
    width = {a: -(-m.shape[a] // shards[a]) for a in axes}
    own = math.prod(width.values())
    if selection == "global":
        width = {a: m.shape[a] for a in axes}
        own = math.prod(width.values())
    k = max(1, math.ceil(fraction * own))

    def shard(place):
        return [i // width[a] for i, a in zip(place, axes, strict=True)]

    found = set()
    for b, place in weight:
        ahead = 0
        for other_b, other in weight:
            if other_b == b and shard(other) == shard(place):
                mine, theirs = weight[b, place], weight[b, other]
                ahead += theirs > mine or (theirs == mine and other < place)
        if ahead < k:
            flat = np.ravel_multi_index(place, [m.shape[a] for a in axes])
            found.add((b, int(flat)))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("selection", ["local", "global"])
@pytest.mark.parametrize("score", ["l1", "l2"])
def test_selection_entry_by_entry(layout, selection, score):
    shape, reduction, output, shards = layout
    rng = np.random.default_rng(0)
    mu, grad = rng.integers(-2, 3, (2, *shape))  # small whole numbers: many ties
    groups = axis_groups(len(shape), reduction, output)
    for fraction, select_axis in itertools.product(
        (0.01, 0.3, 0.5, 0.8), ("sharded", "shorter", "reduction", "output")
    ):
        group = select_group(shape, groups, shards, select_axis)
        result = step(
            grad,
            mu,
            reduction=reduction,
            output=output,
            shards=shards,
            fraction=fraction,
            selection=selection,
            select_axis=select_axis,
            score=score,
            orthogonalize=np.sign,
        )
        expected = naively_selected(
            grad + mu, reduction, output, shards, group, fraction, selection, score
        )
        found = np.argwhere(result.selected).tolist()
        assert {(tuple(b), i) for *b, i in found} == expected

        # sign leaves every entry where it was: what moved is what was selected
        total, inside = grad + mu, spread(result.selected, shape, groups, group)
        np.testing.assert_array_equal(result.update, inside * np.sign(total))
        np.testing.assert_array_equal(result.mu, np.where(inside, 0.95, 1) * total)


def test_ties_go_to_the_lower_index_of_the_shard():
    ones, zeros = np.ones((3, 8)), np.zeros((3, 8))
    kwargs = dict(reduction=0, output=1, select_axis="output", fraction=0.5)
    one = step(ones, zeros, **kwargs)
    assert np.flatnonzero(one.selected).tolist() == [0, 1, 2, 3]
    local = step(ones, zeros, shards=(1, 2), **kwargs)
    assert np.flatnonzero(local.selected).tolist() == [0, 1, 4, 5]
    whole = step(ones, zeros, shards=(1, 2), selection="global", **kwargs)
    assert np.flatnonzero(whole.selected).tolist() == [0, 1, 2, 3]


def test_global_counts_the_true_size_not_the_padded_one():
    grad = np.random.default_rng(0).normal(size=(4, 17))
    result = step(
        grad,
        0 * grad,
        reduction=0,
        output=1,
        shards=(1, 4),
        fraction=0.35,
        selection="global",
    )
    assert result.selected.sum() == 6


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fraction_one_is_the_same_everywhere(layout):
    shape, reduction, output, shards = layout
    grad, mu = np.random.default_rng(0).normal(size=(2, *shape))
    axes = dict(reduction=reduction, output=output, fraction=1)
    one = step(grad, mu, **axes)
    for selection in ("local", "global"):
        for select_axis in ("sharded", "reduction", "output"):
            sharded = step(
                grad,
                mu,
                shards=shards,
                selection=selection,
                select_axis=select_axis,
                **axes,
            )
            assert sharded.selected.all()
            np.testing.assert_array_equal(sharded.update, one.update)
            np.testing.assert_array_equal(sharded.mu, 0.95 * (mu + grad))


def test_given_scores_replace_the_computed_ones():
    rng = np.random.default_rng(0)
    grad = rng.normal(size=(2, 5, 3, 4))  # batch axes 0 and 2
    scores = rng.permuted(np.tile(np.arange(4.0), (2, 3, 1)), axis=-1)
    result = step(grad, 0 * grad, reduction=1, output=3, fraction=0.25, scores=scores)
    np.testing.assert_array_equal(result.selected, scores == 3)


def test_momentum_does_not_depend_on_the_orthogonalizer():
    grad, mu = np.random.default_rng(0).normal(size=(2, 6, 8))
    axes = dict(reduction=0, output=1, shards=(1, 2))
    one = step(grad, mu, **axes)
    other = step(grad, mu, orthogonalize=lambda x: 7 * x, **axes)
    np.testing.assert_array_equal(one.mu, other.mu)
    np.testing.assert_array_equal(one.selected, other.selected)
    np.testing.assert_array_equal(
        other.update, np.where(other.selected, 7 * (mu + grad), 0)
    )


# --- orthogonalization ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5), (1, 6), (6, 1)])
@pytest.mark.parametrize("coeffs", [*PRESETS, (3.0, -3.2, 1.2)], ids=str)
def test_newton_schulz_maps_singular_values_by_the_polynomials(shape, coeffs):
    x = np.random.default_rng(0).normal(size=shape)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / ((1.02 if coeffs == "polar_express" else 1.0) * np.linalg.norm(x) + 0.5)
    for a, b, c in coefficient_rows(coeffs, 5):
        s = a * s + b * s**3 + c * s**5
    np.testing.assert_allclose(
        newton_schulz(x, coeffs, eps=0.5), (u * s) @ vt, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    ("coeffs", "band"), [("polar_express", 0.16), ("classic", 0.05)]
)
def test_newton_schulz_is_nearly_orthogonal(coeffs, band):
    x = np.random.default_rng(0).normal(size=(8, 40))
    s = np.linalg.svd(newton_schulz(x, coeffs), compute_uv=False)
    assert abs(s - 1).max() < band


def test_rows_of_coefficients():
    first, *_, last = PRESETS["classic"]
    assert coefficient_rows("classic", 1) == [first]
    assert coefficient_rows("classic", 7)[4:] == [last, last, last]
    assert coefficient_rows("muon", 3) == [PRESETS["muon"][0]] * 3
    assert coefficient_rows([(1, 2, 3), (4, 5, 6)], 2) == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(ValueError, match="2 rows of coefficients for 5 steps"):
        coefficient_rows([(1, 2, 3), (4, 5, 6)], 5)


@pytest.mark.parametrize("neuron_beta2", [None, 0.95])
def test_zero_momentum_gives_exact_zeros(neuron_beta2):
    zeros = np.zeros((6, 8))
    nu = np.ones((1, 8))
    param, result = dion2_step(
        zeros + 1,
        zeros,
        zeros,
        learning_rate=0.01,
        weight_decay=0.1,
        reduction=0,
        output=1,
        select_axis="output",
        shards=(1, 2),
        neuron_beta2=neuron_beta2,
        nu=None if neuron_beta2 is None else nu,
    )
    assert not result.update.any() and not result.mu.any()
    assert np.flatnonzero(result.selected).tolist() == [0, 4]
    np.testing.assert_array_equal(param, 0.999)
    if neuron_beta2 is not None:
        np.testing.assert_allclose(result.nu[0], np.where(result.selected, 0.95, 1))


def test_an_empty_matrix_has_an_empty_update():
    for shape in ((0, 4), (4, 0)):
        for neuron_beta2 in (None, 0.9):
            empty = np.zeros(shape)
            result = step(
                empty,
                empty,
                reduction=0,
                output=1,
                select_axis="output",
                neuron_beta2=neuron_beta2,
            )
            assert result.update.shape == shape and result.mu.shape == shape


# --- axes, batches, blocks ------------------------------------------------------------


def test_a_step_commutes_with_transposition():
    grad, mu = np.random.default_rng(0).normal(size=(2, 6, 8))
    one = step(grad, mu, reduction=0, output=1, shards=(1, 2), select_axis="output")
    turned = step(
        grad.T, mu.T, reduction=0, output=1, shards=(2, 1), select_axis="reduction"
    )
    np.testing.assert_array_equal(one.selected, turned.selected)
    np.testing.assert_allclose(one.update, turned.update.T, atol=1e-12)
    np.testing.assert_array_equal(one.mu, turned.mu.T)


@pytest.mark.parametrize("neuron_beta2", [None, 0.9])
def test_batch_axes_are_matrices_of_their_own(neuron_beta2):
    rng = np.random.default_rng(0)
    grad, mu = rng.normal(size=(2, 4, 2, 6, 3))  # output 0, batch 1 and 3, reduction 2
    nu = rng.uniform(size=(4, 2, 1, 3)) if neuron_beta2 else None
    options = dict(fraction=0.4, neuron_beta2=neuron_beta2)
    whole = step(grad, mu, reduction=2, output=0, shards=(2, 1, 1, 3), nu=nu, **options)
    assert whole.selected.shape == (2, 3, 4)
    for i, j in np.ndindex(2, 3):
        one = step(
            grad[:, i, :, j].T,
            mu[:, i, :, j].T,
            reduction=0,
            output=1,
            shards=(1, 2),
            nu=nu[:, i, :, j].T if neuron_beta2 else None,
            **options,
        )
        np.testing.assert_array_equal(whole.update[:, i, :, j].T, one.update)
        np.testing.assert_array_equal(whole.mu[:, i, :, j].T, one.mu)
        np.testing.assert_array_equal(whole.selected[i, j], one.selected)
        if neuron_beta2:
            np.testing.assert_array_equal(whole.nu[:, i, :, j].T, one.nu)


@pytest.mark.parametrize("shards", [(1, 1, 1, 1), (1, 2, 1, 1), (1, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("neuron_beta2", [None, 0.9])
def test_splits_are_parameters_of_their_own(shards, neuron_beta2):
    rng = np.random.default_rng(0)
    grad, mu, param = rng.normal(size=(3, 5, 8, 2, 3))  # (in, heads, d, layers)
    nu = rng.uniform(size=(1, 8, 2, 3)) if neuron_beta2 else None
    options = dict(
        reduction=0,
        output=(1, 2),
        shards=shards,
        neuron_beta2=neuron_beta2,
        learning_rate=0.1,
    )
    new, whole = dion2_step(param, grad, mu, nu=nu, splits=(8, 4, 4), **options)
    for i, part in enumerate((slice(0, 4), slice(4, 6), slice(6, 8))):
        new_one, one = dion2_step(
            param[:, part],
            grad[:, part],
            mu[:, part],
            nu=nu[:, part] if neuron_beta2 else None,
            **options,
        )
        np.testing.assert_array_equal(whole.update[:, part], one.update)
        np.testing.assert_array_equal(whole.mu[:, part], one.mu)
        np.testing.assert_array_equal(whole.selected[i], one.selected)
        np.testing.assert_allclose(new[:, part], new_one, rtol=1e-15)
        if neuron_beta2:
            np.testing.assert_array_equal(whole.nu[:, part], one.nu)


def test_splits_that_cannot_be():
    grad = np.zeros((4, 4, 2))
    axes = dict(reduction=0, output=(1, 2))
    with pytest.raises(ValueError, match="do not sum to 8"):
        step(grad, grad, splits=(4, 3), **axes)
    with pytest.raises(ValueError, match="not multiples of 2"):
        step(grad, grad, splits=(5, 3), shards=(1, 2, 1), **axes)
    assert len(step(grad, grad, splits=(5, 3), **axes).selected) == 2


# --- NorDion2 -------------------------------------------------------------------------


def test_neurons_are_evened_out_and_each_shard_keeps_its_norm():
    grad = np.random.default_rng(0).normal(size=(6, 12))
    axes = dict(reduction=0, output=1, shards=(1, 3), fraction=0.5)
    for selection in ("local", "global"):
        plain = step(grad, 0 * grad, selection=selection, select_axis="output", **axes)
        # beta2 = 0: a neuron is divided by its own root mean square
        even = step(grad, 0 * grad, selection=selection, neuron_beta2=0.0, **axes)
        np.testing.assert_array_equal(plain.selected, even.selected)
        mean_square = (plain.update**2).mean(axis=0)
        np.testing.assert_allclose(even.nu[0], mean_square)
        shards = np.split(np.arange(12), 3 if selection == "local" else 1)
        for own in shards:
            here = own[even.selected[own]]
            norms = np.linalg.norm(even.update[:, here], axis=0)
            kept = np.linalg.norm(plain.update[:, here])
            np.testing.assert_allclose(norms, kept / math.sqrt(len(here)))


def test_variance_of_other_neurons_stays():
    rng = np.random.default_rng(0)
    grad, nu = rng.normal(size=(6, 8)), rng.uniform(size=(1, 8))
    result = step(grad, 0 * grad, reduction=0, output=1, nu=nu, neuron_beta2=0.9)
    rest = ~result.selected
    assert rest.sum() == 6 and (result.nu != nu).sum() == 2
    np.testing.assert_array_equal(result.nu[:, rest], nu[:, rest])


# --- the optimizer --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "reduction", "output", "fan_in", "fan_out"),
    [
        ((8, 2), 0, 1, 8, 2),
        ((3, 8, 2), 1, 2, 8, 2),
        ((8, 3, 2), 0, 2, 8, 2),
        ((8, 3, 2), 0, (1, 2), 8, 6),
        ((3, 3, 4, 5), (0, 1, 2), 3, 36, 5),
    ],
)
def test_factor_of_the_learning_rate(shape, reduction, output, fan_in, fan_out):
    grad, param = np.random.default_rng(0).normal(size=(2, *shape))
    axes = dict(reduction=reduction, output=output, fraction=0.25)
    decayed = param * (1 - 0.1 * 0.5)
    for adjust_lr, factor in [
        (None, 1),
        ("spectral_norm", math.sqrt(fan_out / fan_in)),
        ("rms_norm", 0.2 * math.sqrt(max(fan_in, fan_out))),
    ]:
        for adjust_fraction in (False, True):
            new, result = dion2_step(
                param,
                grad,
                0 * grad,
                learning_rate=0.1,
                weight_decay=0.5,
                adjust_lr=adjust_lr,
                adjust_fraction=adjust_fraction,
                **axes,
            )
            rate = 0.1 * factor * (2 if adjust_fraction else 1)
            np.testing.assert_allclose(
                new, decayed - rate * result.update, rtol=0, atol=1e-14
            )
