"""Every option that only changes numbers changes them, as it says."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    KINDS,
    MOMENTUM,
    UPDATE,
    as_it_is,
    float64,
    frobenius,
    make_mesh,
    needed_shardings,
    normal,
    place,
    relative,
)
from rich.console import Console

from dion2_jax import describe, dion2, scale_by_dion2
from dion2_jax.describe import HEADER

# --- the arguments of dion2 -----------------------------------------------------------


@pytest.mark.parametrize("fraction, factor", [(0.25, 2.0), (1.0, 1.0)])
def test_adjust_fraction_multiplies_the_update_but_not_the_decay(fraction, factor):
    params, grads = {"w": normal((8, 16))}, {"w": normal((8, 16), 1)}
    plain, adjusted = (
        dion2(
            *(0.1, fraction),
            adjust_fraction=on,
            weight_decay=0.5,
            newton_schulz_fn=as_it_is,
            ns_dtype=jnp.float32,
        )
        for on in (False, True)
    )
    plain, adjusted = (
        np.asarray(tx.update(grads, tx.init(params), params)[0]["w"])
        for tx in (plain, adjusted)
    )
    decay = -0.1 * 0.5 * params["w"]
    found, expected = adjusted - decay, factor * (plain - decay)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert abs(expected).max() > 0.1


TREE = {"a": {"w": True, "v": False}, "b": {"w": False}}
# A mask, and the leaves that decay.
MASKS = {
    "none": (None, ["a/v", "a/w", "b/w"]),
    "all": (True, ["a/v", "a/w", "b/w"]),
    "nothing": (False, []),
    "tree": (TREE, ["a/w"]),
    "prefix": ({"a": True, "b": False}, ["a/v", "a/w"]),
    "numpy": ({"a": np.False_, "b": np.True_}, ["b/w"]),
    "function": (lambda params: jax.tree.map(lambda x: len(x) == 4, params), ["a/w"]),
    "function of a prefix": (lambda params: {"a": False, "b": None}, ["b/w"]),
}


@pytest.mark.parametrize("mask, decaying", MASKS.values(), ids=MASKS)
def test_weight_decay_mask_says_which_matrices_decay(mask, decaying):
    params = {
        "a": {"v": jnp.ones((6, 4)), "w": jnp.ones((4, 6))},
        "b": {"w": jnp.ones((6, 4))},
    }
    zero = jax.tree.map(jnp.zeros_like, params)
    tx = dion2(
        0.5, weight_decay=0.25, weight_decay_mask=mask, newton_schulz_fn=as_it_is
    )
    updates, _ = tx.update(zero, tx.init(params), params)
    for path, x in jax.tree_util.tree_leaves_with_path(updates):
        name = "/".join(key.key for key in path)
        assert (np.asarray(x) == (-0.125 if name in decaying else 0)).all(), name


# --- what is selected -----------------------------------------------------------------


@functools.cache
def random_selection(seed, sizes, spec):
    """A jitted update that selects by random scores, its gradients, and a state."""
    mesh = make_mesh(sizes, "auto")
    grads = {k: place(np.ones((32, 16), np.float32), mesh, spec) for k in "vw"}
    tx = scale_by_dion2(
        score="random",
        seed=seed,
        selection="global",
        select_axis="reduction",
        newton_schulz_fn=as_it_is,
        param_shardings=needed_shardings(grads, "auto"),
    )
    return jax.jit(tx.update), grads, jax.jit(tx.init)(grads)


def random_rows(seed, sizes=(1,), spec=(), steps=3, state=None):
    """The rows selected of two matrices at every step, and the state after the last."""
    update, grads, start = random_selection(seed, sizes, spec)
    state, rows = state or start, []
    for _ in range(steps):
        updates, state = update(grads, state)
        rows.append({k: np.asarray(updates[k]).any(axis=1) for k in "vw"})
    return rows, state


def same(found, expected):
    return [
        [(a[k] == b[k]).all() for k in "vw"]
        for a, b in zip(found, expected, strict=True)
    ]


def test_random_selection_follows_seed_step_and_leaf():
    rows, _ = random_rows(0)
    assert {int(r[k].sum()) for r in rows for k in "vw"} == {8}  # a quarter of 32
    assert np.all(same(rows, random_rows(0)[0]))
    assert not np.any(same(rows, random_rows(1)[0]))
    assert not np.any(same(rows[:2], rows[1:]))
    assert all((r["v"] != r["w"]).any() for r in rows)


def test_random_selection_goes_on_from_a_restored_state():
    rows, _ = random_rows(0)
    _, state = random_rows(0, steps=1)
    restored = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), state)
    random_selection.cache_clear()  # as in another process
    assert np.all(same(random_rows(0, steps=2, state=restored)[0], rows[1:]))


@pytest.mark.parametrize("sizes, spec", [((8,), ("a",)), ((4, 2), ("b", "a"))], ids=str)
def test_random_selection_is_the_same_on_every_mesh(sizes, spec):
    found, _ = random_rows(1, sizes, spec)
    assert np.all(same(found, random_rows(1)[0]))


# --- how it is orthogonalized ---------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_newton_schulz_fn_takes_the_place_of_newton_schulz(kind):
    mesh, raw = make_mesh((4,), kind), normal((16, 8))
    seen = set()

    def double(x):
        seen.add((x.shape[1:], x.dtype.name))
        return 2 * x

    grads = {"w": place(raw, mesh, ("a",)), "tall": place(raw.T, mesh, ("a",))}
    tx = scale_by_dion2(
        1.0,
        newton_schulz_fn=double,
        ns_dtype=jnp.float32,
        param_shardings=needed_shardings(grads, kind),
    )
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    np.testing.assert_array_equal(updates["w"], 2 * raw)
    np.testing.assert_array_equal(updates["tall"], 2 * raw.T)
    assert seen == {((8, 16), "float32")}  # rows are the short side


@pytest.mark.parametrize(
    "count, shape", [(8, (32, 24)), (1, (32, 4096))], ids=["whole", "team"]
)
def test_gram_makes_the_step_that_direct_does_in_float32(count, shape):
    mesh = make_mesh((8,), "explicit")
    results = []
    for method in ("direct", "gram"):
        tx = scale_by_dion2(ns_method=method, ns_dtype=jnp.float32)
        state, update = None, jax.jit(tx.update)
        for seed in range(2):
            grads = {
                f"w{i}": place(normal(shape, (seed, i)), mesh, ("a",))
                for i in range(count)
            }
            updates, state = update(grads, state or tx.init(grads))
        results.append((updates, state.mu))
    (direct, mu), (gram, gram_mu) = results
    teams = "teams of 8" in describe(grads).rows[0].exchange
    assert teams == (count == 1)
    for w in direct:
        expected = float64(direct[w])
        assert 0 < frobenius(float64(gram[w]), expected) <= UPDATE
        # Rows of a quarter are orthonormal, nearly: eight of 32.
        assert abs(np.linalg.norm(expected) - 8**0.5) < 0.5
        assert relative(float64(gram_mu[w]), float64(mu[w])) <= MOMENTUM


def test_auto_takes_gram_for_long_matrices_and_direct_for_others():
    # Eight rows of 32 are selected: c/r is 16 and 4, and 6.6 is where gram is cheaper.
    grads = {
        "long": jnp.asarray(normal((32, 128))),
        "short": jnp.asarray(normal((32, 32))),
    }
    found = {}
    for method in ("auto", "direct", "gram"):
        tx = scale_by_dion2(ns_method=method, select_axis="reduction")
        updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
        found[method] = jax.tree.map(float64, updates)
    for name, other in (("long", "gram"), ("short", "direct")):
        np.testing.assert_array_equal(found["auto"][name], found[other][name])
    for name in grads:
        assert (found["direct"][name] != found["gram"][name]).any()


# --- describe -------------------------------------------------------------------------


def test_rich_prints_the_rows_and_totals_that_str_does():
    params = {
        "mlp": {"kernel": place(normal((64, 128)), make_mesh((8,), "auto"), ("a",))},
        "norm": jnp.ones(64),
    }
    told = describe(params)
    written = io.StringIO()
    Console(file=written, width=200).print(told)
    lines = [line.strip("│┃ ") for line in written.getvalue().splitlines()]
    cells = [[c.strip() for c in line.replace("┃", "│").split("│")] for line in lines]
    table = [row for row in cells if len(row) == len(HEADER)]
    assert table[0] == list(HEADER)
    rows = {row[0]: row[1:] for row in table[1:]}
    assert list(rows) == ["mlp/kernel", "norm", "total"]
    for row in told.rows:
        words = [row.shape, row.taken_by, row.why, row.selects, row.exchange]
        assert rows[row.path][:5] == words
    for name, cost in [(r.path, r.cost) for r in told.rows] + [("total", told.total)]:
        numbers = [f"{cost.bytes / 1e6:.3g}", f"{cost.operations / 1e9:.3g}"]
        assert rows[name][5:] == numbers
    assert told.total.bytes and told.total.operations
    for line, found in zip(str(told).splitlines()[1:], table[1:], strict=True):
        assert line.split() == " ".join(found).split()
