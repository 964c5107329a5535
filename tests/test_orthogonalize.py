"""Newton-Schulz against the float64 polynomial, its edges, its cost."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dion2_jax import _orthogonalize, _symmetric
from dion2_jax._orthogonalize import (
    COEFFS,
    at_once,
    cheaper_method,
    gram_restarts,
    newton_schulz_table,
    ns_flops,
    orthogonalize,
)
from dion2_jax._symmetric import column_blocks, summed

_path = pathlib.Path(__file__).parents[1] / "benchmarks" / "ns_accuracy.py"
_spec = importlib.util.spec_from_file_location("ns_accuracy", _path)
ns_accuracy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ns_accuracy)

# Five iterations raise the rounding of small singular values by up to 990; 3e-6 to
# 1e-5 was measured at conditions up to 1e5.
FLOAT32 = 2e-5
# The Gram matrix holds the squares: on a square matrix of Gaussian numbers float32
# leaves less of the smallest singular values; 5.4e-5 was measured.
GRAM_SQUARE = 2e-4
# On matrices of Gaussian numbers, of condition below 10: bfloat16 rounds at 4e-3 in
# each of five iterations; 1.5e-2 was measured.
BFLOAT16 = 5e-2

METHODS = ("direct", "gram")
DTYPES = (jnp.float32, jnp.bfloat16)
SMALL = [(1, 1), (1, 4), (4, 4)]
TABLE, NORM_SCALE = newton_schulz_table("polar_express", 5)


def gaussian(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def jitted(method, table=TABLE, norm_scale=NORM_SCALE):
    return jax.jit(
        lambda x, eps: orthogonalize(
            x, table=table, norm_scale=norm_scale, eps=eps, method=method
        )
    )


def distance(x, exact):
    """Relative Frobenius distance of the matrix that is furthest off."""
    x = np.asarray(jnp.asarray(x, jnp.float32), np.float64)
    axes = (-2, -1)
    off = np.linalg.norm(x - exact, axis=axes) / np.linalg.norm(exact, axis=axes)
    return off.max()


@pytest.mark.parametrize("preset", COEFFS)
def test_preset_is_cut_or_its_last_row_repeated(preset):
    rows = COEFFS[preset]
    for steps in (1, 3, 5, 7):
        table, scale = newton_schulz_table(preset, steps)
        assert table == tuple(rows[min(i, len(rows) - 1)] for i in range(steps))
        assert scale == (1.02 if preset == "polar_express" else 1.0)


def test_table_or_one_triple():
    triple = (3.0, -3.2, 1.2)
    for given in (triple, list(triple), np.array(triple)):
        assert newton_schulz_table(given, 3) == ((triple,) * 3, 1.0)
    for given in ([list(triple)] * 2, np.array([triple] * 2)):
        assert newton_schulz_table(given, 2) == ((triple,) * 2, 1.0)


@pytest.mark.parametrize(
    "coeffs, steps, error, match",
    [
        ("polar", 5, ValueError, "'polar_express', 'classic', 'muon'.*got 'polar'"),
        ("muon", 0, ValueError, "ns_steps must be at least 1, got 0"),
        ("muon", 5.0, TypeError, "ns_steps must be an int.*got 5.0"),
        ("muon", True, TypeError, "ns_steps must be an int.*got True"),
        ([(1, 2, 3)] * 4, 5, ValueError, "ns_steps=5 iterations, got 4"),
        ([], 5, ValueError, r"three finite numbers \(a, b, c\), got \[\]"),
        ([(1, 2)] * 5, 5, ValueError, "three finite numbers"),
        ((1, 2, float("nan")), 5, ValueError, "three finite numbers"),
        (3.0, 5, TypeError, "ns_coeffs must be a preset's name.*got 3.0"),
        ([(1, 2, None)], 1, TypeError, "three Python numbers.*None"),
    ],
)
def test_bad_coefficients_name_what_is_allowed(coeffs, steps, error, match):
    with pytest.raises(error, match=match):
        newton_schulz_table(coeffs, steps)


@pytest.mark.parametrize("preset", COEFFS)
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_float64_polynomial(method, preset):
    x = gaussian(2, 3, 12, 20)
    table, scale = newton_schulz_table(preset, 5)
    run = jitted(method, table, scale)
    for eps in (1e-8, 0.5):
        exact = ns_accuracy.polynomial(x, table, scale, eps)
        assert distance(run(x, eps), exact) < FLOAT32
    assert run._cache_size() == 1, "a new eps must not compile anew"
    y = run(jnp.asarray(x, jnp.bfloat16), 1e-8)
    assert y.dtype == jnp.bfloat16
    exact = ns_accuracy.polynomial(
        np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)), table, scale, 1e-8
    )
    assert distance(y, exact) < BFLOAT16


@pytest.mark.parametrize("method", METHODS)
def test_square_and_transposed_tall(method):
    run = jitted(method)
    square, tall = gaussian(12, 12), gaussian(20, 12)
    exact = ns_accuracy.polynomial(square, TABLE, NORM_SCALE, 1e-8)
    limit = FLOAT32 if method == "direct" else GRAM_SQUARE
    assert distance(run(square, 1e-8), exact) < limit
    # The float64 polynomial on the tall side: rows are the long one there.
    exact = ns_accuracy.polynomial(tall, TABLE, NORM_SCALE, 1e-8)
    assert distance(run(tall.T, 1e-8).T, exact) < FLOAT32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_zero_bad_and_extreme_matrices_keep_to_themselves(method, dtype):
    run = jitted(method)
    x = jnp.asarray(gaussian(6, 12, 20), dtype)
    # A power of two, so that every rounding is the same as without it.
    big, small = x[0] * 2.0**100, x[0] * 2.0**-100
    nan, inf = x[4].at[3, 5].set(jnp.nan), x[5].at[3, 5].set(jnp.inf)
    mixed = jnp.stack([x[0], big, small, jnp.zeros_like(x[0]), nan, inf])
    plain, y = np.asarray(run(x, 0.0)), np.asarray(run(mixed, 0.0))
    for i in range(3):
        np.testing.assert_array_equal(y[i], plain[0])
    assert not y[3].any()
    assert np.isnan(y[4]).any() and np.isnan(y[5]).any()
    assert not np.asarray(run(mixed, 1e-8))[3].any()

    exact = ns_accuracy.polynomial(np.asarray(x[:1], np.float64), TABLE, NORM_SCALE, 0)
    for by in (1e30, 1e-30, 1e-35):
        y = run(x * jnp.asarray(by, dtype), 0.0)[:1]
        assert distance(y, exact) < (FLOAT32 if dtype == jnp.float32 else BFLOAT16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_nothing_stays_nothing_where_a_sum_has_few_terms(shape, method, dtype):
    """A zero 1 x 1 matrix was NaN once: XLA joined two scales to 2**160, infinity."""
    run = jitted(method)
    zero, little = (jnp.full((1, *shape), value, dtype) for value in (0, 1e-30))
    limit = FLOAT32 if method == "direct" else GRAM_SQUARE
    limit = limit if dtype == jnp.float32 else BFLOAT16
    for eps in (0.0, 1e-8):
        assert (np.asarray(run(zero, eps)) == 0).all()
        values = np.asarray(little.astype(jnp.float32))
        exact = ns_accuracy.polynomial(values, TABLE, NORM_SCALE, eps)
        assert distance(run(little, eps), exact) < limit


@pytest.mark.parametrize("method", METHODS)
def test_team_equals_one_device(method):
    """Two matrices, each in four blocks of 5 columns, fewer than its 12 rows."""
    x = gaussian(2, 12, 20)
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    summed = set()

    def combine(partial):
        summed.add((partial.shape, partial.dtype.name))
        return jax.lax.psum(partial, "d", axis_index_groups=groups)

    def run(block):
        return orthogonalize(
            block,
            table=TABLE,
            norm_scale=NORM_SCALE,
            eps=1e-8,
            method=method,
            combine=combine,
        )

    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P("d", None, None)
    team = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    blocks = x.reshape(2, 12, 4, 5).swapaxes(1, 2).reshape(8, 12, 5)
    y = np.asarray(team(blocks)).reshape(2, 4, 12, 5).swapaxes(1, 2).reshape(2, 12, 20)
    assert distance(y, np.asarray(jitted(method)(x, 1e-8), np.float64)) < FLOAT32

    summed.clear()
    jax.eval_shape(team, jax.ShapeDtypeStruct((8, 12, 5), jnp.bfloat16))
    gram = "bfloat16" if method == "direct" else "float32"
    assert summed == {((1, 3), "float32"), ((1, 12, 12), gram)}


def equations(jaxpr, times=1):
    """(equation, how often it runs) of a jaxpr, inner ones included."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = times * eqn.params.get("length", 1)
        for value in eqn.params.values():
            if hasattr(value, "eqns"):
                yield from equations(value, inner)
            elif hasattr(value, "jaxpr"):
                yield from equations(value.jaxpr, inner)


def traced(method, dtype, shape, steps):
    table, scale = newton_schulz_table("polar_express", steps)
    run = jitted(method, table, scale)
    return run.trace(jax.ShapeDtypeStruct(shape, dtype), 1e-8).jaxpr.jaxpr


@pytest.mark.parametrize("method", METHODS)
def test_program_does_not_grow_with_steps(method):
    few, many = 2, 5 if method == "gram" else 50
    sizes = [
        sum(1 for _ in equations(traced(method, jnp.bfloat16, (12, 20), steps)))
        for steps in (few, many)
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("r", (12, 256, 512))
@pytest.mark.parametrize("steps", (1, 5, 12))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_operations_are_those_of_the_program(method, dtype, steps, r):
    c, team = 20, 4
    count = 0
    for eqn, times in equations(traced(method, dtype, (r, c // team), steps)):
        if eqn.primitive.name == "dot_general":
            left, right = (v.aval for v in eqn.invars)
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = np.prod([left.shape[i] for i in contracted])
            highest = (jax.lax.Precision.HIGHEST,) * 2
            assert left.dtype == right.dtype
            if left.dtype == jnp.float32:
                assert eqn.params["precision"] == highest
            passes = 6 if left.dtype == jnp.float32 else 1
            count += times * passes * 2 * inner * np.prod(eqn.outvars[0].aval.shape)
    restarts = gram_restarts(newton_schulz_table("polar_express", steps)[0])
    assert restarts == (1 if steps == 12 else 0)
    assert count == ns_flops(
        r, c, steps=steps, method=method, dtype=dtype, team=team, restarts=restarts
    )


@pytest.mark.parametrize("method", METHODS)
def test_blocks_of_symmetric_products_change_rounding_alone(method, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (2, 256, 300))
    run = lambda: orthogonalize(  # noqa: E731
        x, table=COEFFS["classic"], norm_scale=1.0, eps=1e-8, method=method
    )
    assert column_blocks(256) == 2
    blocks = np.asarray(run())
    monkeypatch.setattr(_symmetric, "column_blocks", lambda r: 1)
    whole = np.asarray(run())
    # The Gram iteration squares the condition number: 50 times the rounding of 6e-8.
    assert np.linalg.norm(blocks - whole) <= 1e-4 * np.linalg.norm(whole)
    assert (blocks != 0).all()


@pytest.mark.parametrize("r", (12, 256, 512))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_team_sums_half_of_a_symmetric_product(dtype, r):
    t, c, sent = 3, 12, []

    def combine(partial):
        sent.append(partial.size)
        assert partial.dtype == dtype
        return jax.lax.psum(partial, "team")

    def product(x, combine=None):
        return _symmetric.symmetric_product(
            _orthogonalize._matmul, x, x.mT, combine, dtype
        )

    x = jax.random.normal(jax.random.key(r), (r, t * c), dtype)
    parts = jnp.stack(jnp.split(x, t, axis=1))
    found = jax.vmap(lambda part: product(part, combine), axis_name="team")(parts)
    wide = np.asarray(x, np.float64)
    wanted = wide @ wide.T
    # Each of the three parts is rounded to dtype, and their sum twice; sums of 36
    # products of numbers of size 1, of at most 100.
    rounding = 5 * 100 * float(jnp.finfo(dtype).eps)
    assert np.abs(wanted).max() < 100
    for device in np.asarray(found, np.float64):
        assert np.abs(device - wanted).max() < rounding
        assert (device == np.asarray(found, np.float64)[0]).all()
    assert sent == [summed(r)] == [r * r if r == 12 else r * (r + 1) // 2]


@pytest.mark.parametrize("pad", (0, 2))
@pytest.mark.parametrize("method", METHODS)
def test_matrices_in_turns_change_nothing(method, pad, monkeypatch):
    """More matrices than stay on a chip, in a team of two, go two or four at a time."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 2, 8, 20))  # team, batch, r, c/2

    def run():
        one = lambda x: orthogonalize(  # noqa: E731
            x,
            table=COEFFS["classic"],
            norm_scale=1.0,
            eps=1e-8,
            method=method,
            combine=lambda partial: jax.lax.psum(partial, "team"),
        )
        of_team = jax.vmap(one, axis_name="team")
        return of_team(x), str(jax.make_jaxpr(of_team)(x))

    wanted, text = run()
    assert not {"length=6", "length=3", "length=2"} & {*text.split()}
    together, turns = (4, 2) if pad else (2, 3)
    monkeypatch.setattr(_orthogonalize, "at_once", lambda *_: together)
    found, text = run()
    assert f"length={turns}" in text
    assert found.shape == x.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_how_many_matrices_stay_on_a_chip():
    # 16 MiB: 16 of 512 x 1024 in bfloat16; divisors of the batch; at least one.
    for batch, dtype, n in [
        ((128,), jnp.bfloat16, 16),
        ((2, 9), jnp.bfloat16, 9),
        ((128,), jnp.float32, 8),
        ((7,), jnp.bfloat16, 7),
        ((17,), jnp.bfloat16, 1),
        ((), jnp.bfloat16, 1),
    ]:
        assert at_once((*batch, 512, 1024), jnp.dtype(dtype)) == n
    bfloat16 = jnp.dtype(jnp.bfloat16)
    assert at_once((4, 4096, 4096), bfloat16) == 1
    assert at_once((0, 4, 4), bfloat16) == 0
    # Below 1 MiB, 32 of 128 x 128, zero matrices are better than more turns.
    assert at_once((1024, 128, 128), bfloat16) == 512
    assert at_once((1031, 128, 128), bfloat16) == 344  # 3 turns, one zero matrix
    assert at_once((2 * 523, 128, 128), bfloat16) == 349  # 3, one; not 523 of two


def test_auto_takes_the_cheaper_and_in_float32_the_more_accurate():
    # 14 r^2 c saved, 92 r^3 spent: from c/r of 6.6, in a team of t from 6.6 t.
    for c, team, best in [(6, 1, "direct"), (7, 1, "gram"), (26, 4, "direct")]:
        found = cheaper_method(64, 64 * c, steps=5, dtype=jnp.bfloat16, team=team)
        assert found == best
    assert cheaper_method(64, 64 * 27, steps=5, dtype=jnp.bfloat16, team=4) == "gram"
    assert cheaper_method(64, 64 * 99, steps=5, dtype=jnp.float32) == "direct"


@pytest.mark.parametrize("size", ns_accuracy.SIZES, ids=str)
def test_gram_is_no_worse_than_direct_in_bfloat16(size):
    """Distance and singular values, at conditions from 1e0.5 to 1e5."""
    result = ns_accuracy.measure(*size)
    limits = result["direct", jnp.bfloat16]
    for dtype in DTYPES:
        for error, limit in zip(result["gram", dtype], limits, strict=True):
            assert np.all(error <= limit), (size, dtype, error, limit)


def test_gram_stays_finite_over_many_steps(monkeypatch):
    """Twelve iterations at condition 1e5: right with restarts, infinite without."""
    result = ns_accuracy.measure(128, 128, steps=12)
    assert np.all(result["gram", jnp.bfloat16][0] <= result["direct", jnp.bfloat16][0])
    monkeypatch.setattr(_orthogonalize, "_GROWTH", np.inf)
    table, scale = newton_schulz_table("polar_express", 12)
    x = jnp.asarray(ns_accuracy.matrices(128, 128), jnp.bfloat16)
    assert not np.isfinite(jitted("gram", table, scale)(x, 1e-8)).all()
