"""`stats` against plain NumPy, by what the oracle selects, on every kind of layout."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import dion2_state, make_mesh, needed_shardings, normal, place
from optax.contrib import MuonDimensionNumbers
from reference import axis_groups, from_matrices, to_matrices
from reference import step as reference_step
from test_layouts import LAYOUTS, OF_THE_ORACLE, leaves_of, shards

import dion2_jax
from dion2_jax._measure import _error

LEVELS = dict(min=0, p10=10, p25=25, p50=50, p75=75, p90=90, max=100)
CHOSEN = {
    "both axes": "explicit",
    "replicas share, exact": "auto",
    "experts, sharded matrices, neurons": "auto",
    "heads in the output, inner axis sharded, exact, rounds": "explicit",
    "fused, output sharded, both axes selected": "auto",
    "fused heads of a stack": "explicit",
}


def blocks_of(x, axes, splits):
    """[*shape] -> of every block float64[B, R, O]."""
    matrices = to_matrices(x, axis_groups(x.ndim, *axes))
    sizes = splits or (matrices.shape[2],)
    return np.split(matrices, np.cumsum(sizes[:-1]), axis=2)


def slices_first(block, selected):
    """[B, R, O] -> [B, n, c], and the mask [B, n]."""
    selected = selected.reshape(len(block), -1)
    by_output = selected.shape[1] == block.shape[2]
    return (block.swapaxes(1, 2) if by_output else block), selected, by_output


def made_up_update(block, selected, rng):
    """[B, R, O]: U U^T is diagonal on the selected slices; noise on the others.

    Returns it and the squared orthogonality error of every matrix: of a diagonal
    matrix the random estimate is exact.
    """
    x, selected, by_output = slices_first(block, selected)
    update, errors = rng.normal(size=x.shape), []
    for u, rows in zip(update, selected, strict=True):
        k, c = rows.sum(), x.shape[2]
        lengths = rng.uniform(0.5, 2, size=min(k, c))
        q = np.linalg.qr(rng.normal(size=(max(k, c), min(k, c))))[0]
        u[rows] = (q * lengths) if k > c else (q * lengths).T
        errors.append(np.mean((lengths**2 / np.mean(lengths**2) - 1) ** 2))
    return (update.swapaxes(1, 2) if by_output else update), errors


def expected(parts):
    """The report of matrices of (norms, selected, waited, update, parameter, error)."""
    norms, selected, waited, update, parameter, errors = zip(*parts, strict=True)
    flat = lambda arrays: np.concatenate([x.ravel() for x in arrays])  # noqa: E731
    relative = flat([x / x.mean(axis=1, keepdims=True) for x in norms])
    chosen, steps = flat(selected), flat(waited)
    return {
        "selected_mass": flat(norms)[chosen].sum() / flat(norms).sum(),
        **{f"norm_{q}": np.percentile(relative, p) for q, p in LEVELS.items()},
        "wait_mean": steps[chosen].mean(),
        "wait_max": steps.max(),
        "orthogonality_error": math.sqrt(np.mean(sum(errors, []))),
        "update_to_parameter": np.linalg.norm(flat(update))
        / np.linalg.norm(flat(parameter)),
    }


def assert_numbers(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        assert x.shape == () and x.dtype == jnp.float32
        assert x == pytest.approx(wanted[name], rel=1e-5), name


@pytest.mark.parametrize("name", CHOSEN)
def test_every_layout_equals_numpy(name):
    kind = CHOSEN[name]
    sizes, described, arguments = LAYOUTS[name]
    mesh = make_mesh(sizes, kind)
    leaves = leaves_of(described)
    splits = arguments.get("weight_splits")
    on_mesh = lambda tree: {  # noqa: E731
        w: place(np.float32(x), mesh, leaves[w][1]) for w, x in tree.items()
    }
    rng = np.random.default_rng(0)
    params = {w: rng.normal(size=x[0]) for w, x in leaves.items()}
    placed = on_mesh(params)
    arguments = arguments | dict(
        weight_dimension_numbers={
            w: MuonDimensionNumbers(*axes) for w, (_, _, axes) in leaves.items()
        },
        param_shardings=needed_shardings(placed, kind),
    )
    known = {k: v for k, v in arguments.items() if k in OF_THE_ORACLE}
    stats = dion2_jax.stats(**arguments)
    measure = jax.jit(stats.measure)
    mu = {w: np.zeros(x[0]) for w, x in leaves.items()}
    waits = stats.init(placed)
    age = {w: [0] * len(splits or (1,)) for w in leaves}
    for t in range(2):
        state = dion2_jax.ScaleByDion2State(place(np.int32(t), mesh), on_mesh(mu))
        grads = {w: np.float32(rng.normal(size=x[0])) for w, x in leaves.items()}
        updates, parts = {}, {}
        for w, (shape, spec, (reduction, output)) in leaves.items():
            momentum = np.float32(mu[w]) + grads[w]
            step = reference_step(
                *(grads[w], np.float32(mu[w])),
                reduction=reduction,
                output=output,
                shards=shards(mesh, spec, len(shape)),
                ef_decay=0.9,
                splits=splits,
                orthogonalize=lambda x: x,
                **known,
            )
            mu[w] = step.mu
            masks = step.selected if splits else (step.selected,)
            axes = (reduction, output)
            whole, parts[w] = [], []
            for b, (m, p, mask) in enumerate(
                zip(
                    blocks_of(momentum, axes, splits),
                    blocks_of(params[w], axes, splits),
                    masks,
                    strict=True,
                )
            ):
                update, errors = made_up_update(m, mask, rng)
                whole.append(update)
                m, mask, _ = slices_first(m, mask)
                waited = np.zeros(mask.shape, int) + age[w][b] + 1
                age[w][b] = np.where(mask, 0, waited)
                parts[w].append((abs(m).sum(axis=2), mask, waited, update, p, errors))
            groups = axis_groups(len(shape), *axes)
            updates[w] = from_matrices(np.concatenate(whole, axis=2), shape, groups)
        report, waits = measure(on_mesh(grads), state, placed, waits, on_mesh(updates))
        assert report["leaves"].keys() == leaves.keys()
        for w, numbers in report["leaves"].items():
            assert_numbers(numbers, expected(parts[w]))
        for each, ages in zip(waits, (age[w] for w in sorted(leaves)), strict=True):
            for found, steps in zip(each, ages, strict=True):
                np.testing.assert_array_equal(found, steps)
        rows = dion2_jax.describe(placed, **arguments).rows
        members = {}
        for row in rows:
            for g in row.exchange.split()[0].removeprefix("#").split(","):
                members.setdefault(f"#{g}", []).extend(parts[row.path])
        assert report["groups"].keys() == members.keys()
        if not splits:  # describe does not say which block is in which group
            for g, numbers in report["groups"].items():
                assert_numbers(numbers, expected(members[g]))
    again = jax.eval_shape(stats.init, placed)
    assert jax.tree.map(jnp.shape, waits) == jax.tree.map(jnp.shape, again)


def test_waits_are_in_the_order_of_the_leaf():
    """Matrix i of the stack selects slices 2 i and 2 i + 1, wherever it lies."""
    mesh = make_mesh((2, 2, 2), "auto")
    x = np.ones((8, 16, 4), np.float32)
    wanted = np.ones((8, 16), int)
    for i in range(8):
        x[i, 2 * i : 2 * i + 2] = 9
        wanted[i, 2 * i : 2 * i + 2] = 0
    params = {"w": place(x, mesh, (("b", "a"),))}
    arguments = dict(
        weight_dimension_numbers=MuonDimensionNumbers(1, 2),
        param_shardings=dion2_jax.shardings_of(params),
        select_axis="reduction",
    )
    stats = dion2_jax.stats(0.125, **arguments)
    state = dion2_jax.scale_by_dion2(0.125, **arguments).init(params)
    _, waits = stats.measure(params, state, params, stats.init(params))
    np.testing.assert_array_equal(waits[0][0], wanted)


def test_updates_may_be_of_some_leaves_alone():
    params = {"a": jnp.ones((4, 6)), "b": jnp.ones((4, 8))}  # norms of one shape
    state, stats = dion2_jax.scale_by_dion2().init(params), dion2_jax.stats()
    report, _ = stats.measure(params, state, params, updates={"a": params["a"]})
    assert "update_to_parameter" in report["leaves"]["a"]
    assert "update_to_parameter" not in report["leaves"]["b"]


def test_numbers_are_float32_with_x64():
    with jax.enable_x64(True):
        params = {"w": jnp.ones((4, 6))}
        state, stats = dion2_jax.scale_by_dion2().init(params), dion2_jax.stats()
        waits = stats.init(params)
        report, waits = stats.measure(params, state, params, waits, params)
    assert params["w"].dtype == jnp.float64 and waits[0][0].dtype == jnp.int32
    assert {x.dtype for x in report["leaves"]["w"].values()} == {np.dtype("float32")}


def test_it_measures_what_dion2_selects_and_leaves_the_state_alone():
    params = {"a": normal((8, 12)), "b": normal((8,), 1), "c": normal((8, 12), 2)}
    params = jax.tree.map(jnp.asarray, params)
    arguments = dict(fraction=0.3, score="random", seed=3)
    tx, stats = dion2_jax.dion2(0.1, **arguments), dion2_jax.stats(**arguments)
    state, waits = tx.init(params), stats.init(params)
    for missing in ((), ("c",)):
        grads = {w: None if w in missing else x for w, x in params.items()}
        momentum = {
            w: dion2_state(state).mu[w] + params[w]
            for w in "ac"
            if grads[w] is not None
        }
        report, waits = stats.measure(grads, state, params, waits)
        updates, after = tx.update(grads, state, params)
        assert report["leaves"].keys() == momentum.keys()
        for w, m in momentum.items():
            selected = np.asarray((dion2_state(after).mu[w] != m).any(axis=1))
            norms = np.asarray(abs(m).sum(axis=1))
            numbers = report["leaves"][w]
            share = norms[selected].sum() / norms.sum()
            assert selected.sum() == 3
            assert float(numbers["selected_mass"]) == pytest.approx(share, rel=1e-6)
            assert "update_to_parameter" not in numbers
        state = after
    assert waits[0].__len__() == 1 and (waits[0][0] <= 2).all()
    assert waits[1][0].max() == 1  # the second step did not count for "c"


def test_another_fraction_is_measured_on_the_same_momentum():
    params = {"w": jnp.asarray(normal((16, 24)))}
    state = dion2_jax.scale_by_dion2().init(params)
    found = [
        dion2_jax.stats(f).measure(params, state, params)[0]["leaves"]["w"]
        for f in (0.125, 0.5, 1.0)
    ]
    norms = np.sort(abs(np.asarray(params["w"])).sum(axis=1))[::-1]
    share = np.cumsum(norms) / norms.sum()
    shares = [x["selected_mass"] for x in found]
    np.testing.assert_allclose(shares, share[[1, 7, 15]], rtol=1e-6)
    assert "wait_max" not in found[0]


def test_the_random_estimate_of_the_error_is_near():
    u = normal((64, 8, 20))
    scale = np.square(u).sum(axis=(1, 2)) / 8
    gram = u @ u.swapaxes(1, 2) / scale[:, None, None]
    exact = np.square(gram - np.eye(8)).sum(axis=(1, 2)) / 8
    rows = jnp.ones((64, 8), bool)
    key = jax.random.key(0)
    found = _error(key, jnp.asarray(u), rows, 8, jnp.asarray(8 * scale), (), ())
    # A vector of signs for each: 64 matrices leave 5 % of chance.
    assert float(found.mean()) == pytest.approx(exact.mean(), rel=0.15)


def test_the_estimate_of_the_error_averages_out_over_steps():
    params, u = {"w": jnp.ones((3, 20))}, normal((3, 20))
    scale = np.square(u).sum() / 3
    exact = np.square(u @ u.T / scale - np.eye(3)).sum() / 3
    state, stats = dion2_jax.scale_by_dion2(1.0).init(params), dion2_jax.stats(1.0)

    def error(count):
        before = state._replace(count=count)
        report, _ = stats.measure(params, before, params, updates={"w": u})
        return report["leaves"]["w"]["orthogonality_error"]

    found = np.square(np.asarray(jax.vmap(error)(jnp.arange(400)), np.float64))
    # As much chance as the steps themselves show; 4 deviations of it.
    assert found.mean() == pytest.approx(exact, abs=4 * found.std() / 20)
    assert found.std() < exact  # so the line above says something


def test_nothing_is_measured_before_the_updates_are_there():
    """XLA does not see that the condition which ties the momentum to them is false."""
    params = {"w": jnp.ones((4, 6))}
    state, measure = dion2_jax.scale_by_dion2().init(params), dion2_jax.stats().measure

    def share(updates):
        report, _ = measure(params, state, params, updates=updates)
        return report["leaves"]["w"]["selected_mass"]

    text = jax.jit(share).lower(params).compile().as_text()
    (name,) = re.findall(
        r"(%\S+) = f32\[4,6\]\S* parameter\(0\)", text.split("ENTRY")[1]
    )
    assert len(re.findall(re.escape(name) + r"\b", text.split("ENTRY")[1])) > 1


def test_zeros_are_measured_without_a_nan():
    params = {"w": jnp.ones((4, 6))}
    zeros = {"w": jnp.zeros((4, 6))}
    state, stats = dion2_jax.scale_by_dion2().init(params), dion2_jax.stats()
    report, _ = stats.measure(zeros, state, params, stats.init(params), zeros)
    assert all(np.isfinite(x) for x in report["groups"]["#0"].values())


def test_errors_name_what_to_give():
    params = {"w": jnp.ones((4, 6)), "head": jnp.ones((6, 4))}
    state = dion2_jax.dion2(0.1).init(params)
    with pytest.raises(TypeError, match=r"stats\(\) got an unexpected argument 'rate'"):
        dion2_jax.stats(rate=1)
    with pytest.raises(ValueError, match="found 0 in ScaleByAdamState"):
        dion2_jax.stats().measure(params, optax.scale_by_adam().init(params), params)
    other = dion2_jax.stats(weight_dimension_numbers=MuonDimensionNumbers(0, 1))
    with pytest.raises(ValueError, match="no momentum for the matrix 'head'"):
        other.measure(params, state, params)
    more = dion2_jax.scale_by_dion2(weight_dimension_numbers=MuonDimensionNumbers(0, 1))
    stats = dion2_jax.stats()
    with pytest.raises(ValueError, match="has momentum for 'head', which is no matrix"):
        stats.measure(params, more.init(params), params)
    turned = {"w": jnp.ones((6, 4))}
    with pytest.raises(ValueError, match=r"its update has shape \(6, 4\)"):
        stats.measure(params, state, params, updates=turned)
    with pytest.raises(ValueError, match=r"its parameter has shape \(6, 4\)"):
        stats.measure(params, state, params | turned)
    for wrong in ((), stats.init({"w": jnp.ones((6, 5))}), params):
        with pytest.raises(ValueError, match=r"of shapes \[\(1, 4\)\], found \["):
            stats.measure(params, state, params, wrong)
