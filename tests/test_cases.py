"""Small inputs on which optimizers of this family were reported to fail, by number.

Cases 1, 3, 4, 8, 10, 17, 20 and 22 stand among the tests of their kind; `pytest -k
test_case` runs all 22.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import (
    MOMENTUM,
    UPDATE,
    as_it_is,
    dion2_state,
    float64,
    frobenius,
    make_mesh,
    needed_shardings,
    normal,
    place,
    relative,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

from dion2_jax import STATIC_ARGS, describe, dion2, scale_by_dion2, shardings_of


def update(tx, grads, params):
    """The first update of `tx`, and the state after it."""
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p))(grads, params)


@pytest.mark.parametrize("spec", [(), (None, "a")], ids=str)
def test_case_02_padding_counts_for_no_slices(spec):
    grads = {"w": place(normal((17, 24)), make_mesh((4,), "explicit"), spec)}
    tx = scale_by_dion2(0.35, selection="global", select_axis="reduction")
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    # Of 20 rows, what four equal shards would be padded to, it would be 7.
    assert np.asarray(updates["w"]).any(axis=1).sum() == 6


def test_case_02_rows_that_would_need_padding_are_refused():
    sharding = NamedSharding(make_mesh((4,), "auto"), P("a"))
    tx = scale_by_dion2(0.35, selection="global", param_shardings=sharding)
    with pytest.raises(ValueError, match="size 17 .* 4 equal shards"):
        tx.init({"w": jnp.ones((17, 24))})


@pytest.mark.skipif(
    optax.__version__ in ("0.2.6", "0.2.7"),
    reason="MultiSteps of these releases takes no bfloat16 gradients of float32 "
    "parameters, whatever the optimizer",
)
def test_case_05_multi_steps_of_bfloat16_gradients_is_one_averaged_step():
    rng = np.random.default_rng(0)
    params = {"b": jnp.ones(16), "w": jnp.ones((8, 16))}
    # Whole numbers: their mean is exact, so the same slices are selected.
    raw = [
        {k: rng.integers(-9, 10, x.shape) for k, x in params.items()} for _ in range(2)
    ]
    tx = dion2(0.1, ns_dtype=jnp.float32)
    mean = jax.tree.map(lambda a, b: jnp.float32(a + b) / 2, *raw)
    wanted, after = update(tx, mean, params)
    multi = optax.MultiSteps(tx, 2)
    state, step = multi.init(params), jax.jit(multi.update)
    for grads in raw:
        grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.bfloat16), grads)
        updates, state = step(grads, state, params)
        assert {x.dtype for x in updates.values()} == {jnp.dtype(jnp.bfloat16)}
    for k in params:  # to the last bit of bfloat16
        found = float64(updates[k])
        np.testing.assert_allclose(found, wanted[k], rtol=2**-8, atol=UPDATE)
        assert found.any()
    found, expected = (dion2_state(x).mu["w"] for x in (state.inner_opt_state, after))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("one", [1, np.int64(1)], ids=["int", "numpy"])
def test_case_06_a_fraction_of_int_one_is_all(one):
    grads = {"w": jnp.asarray(normal((8, 16)))}
    found, expected = (
        update(dion2(0.1, f, newton_schulz_fn=as_it_is), grads, grads)[0]["w"]
        for f in (one, 1.0)
    )
    np.testing.assert_array_equal(found, expected)
    assert np.asarray(found).all()
    assert describe(grads, one).rows == describe(grads, 1.0).rows


def test_case_07_embedding_and_head_go_to_adamw():
    params = {
        "embedding": jnp.asarray(normal((48, 16))),
        "lm_head": {"kernel": jnp.asarray(normal((16, 48)))},
        "mlp": {"kernel": jnp.asarray(normal((16, 16)))},
    }
    tx = dion2(0.1, newton_schulz_fn=as_it_is)
    adamw = optax.adamw(0.1, 0.9, 0.95, weight_decay=0.01)
    found, expected = (update(x, params, params)[0] for x in (tx, adamw))
    alike = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b)), found, expected)
    assert alike == {
        "embedding": True,
        "lm_head": {"kernel": True},
        "mlp": {"kernel": False},
    }
    told = {row.path: (row.taken_by, row.why) for row in describe(params).rows}
    assert told == {
        "embedding": ("adamw", "'embedding' names a table of vectors"),
        "lm_head/kernel": ("adamw", "'lm_head' names a table of vectors"),
        "mlp/kernel": ("dion2", "rank 2"),
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A tree that can be called, as an Equinox module can."""

    w: Any
    b: Any

    def __call__(self, x):
        raise AssertionError("a tree was called as a function")


def test_case_09_a_tree_that_can_be_called_is_a_tree():
    mesh = make_mesh((8,), "auto")
    params = Layer(place(normal((8, 16)), mesh, (None, "a")), place(normal(16), mesh))
    entries = {
        "weight_dimension_numbers": (MuonDimensionNumbers(1, 0), None),
        "weight_splits": ((2, 6), None),
        "weight_decay_mask": (False, None),
        "param_shardings": (params.w.sharding, params.b.sharding),
    }
    as_trees = {name: Layer(*given) for name, given in entries.items()}
    as_functions = {
        name: lambda tree, given=given: {"w": given[0], "b": given[1]}
        for name, given in entries.items()
    }
    found, expected = (
        update(dion2(0.1, newton_schulz_fn=as_it_is, **given), params, params)[0]
        for given in (as_trees, as_functions)
    )
    np.testing.assert_array_equal(found.w, expected.w)
    np.testing.assert_array_equal(found.b, expected.b)
    assert describe(params, **as_trees).rows[0].selects.count("a shard") == 2
    assert np.asarray(found.w).any()


def test_case_11_a_matrix_sharded_over_two_explicit_axes():
    mesh, raw = make_mesh((4, 2), "explicit"), normal((16, 24))
    params = {"b": place(normal(24), mesh, ("b",)), "w": place(raw, mesh, ("a", "b"))}
    options = dict(selection="global", select_axis="reduction", ns_dtype=jnp.float32)
    tx = dion2(0.1, **options)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: sum(jnp.sum(x * x) for x in p.values()))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), updates, state

    with jax.set_mesh(mesh):
        moved, updates, state = step(params, tx.init(params))
    one = jax.tree.map(np.asarray, params)
    expected, _ = update(tx, jax.tree.map(lambda x: 2 * x, one), one)
    for k, p in params.items():
        assert updates[k].sharding == moved[k].sharding == p.sharding
        assert frobenius(float64(updates[k]), float64(expected[k])) <= UPDATE
        np.testing.assert_allclose(moved[k], p + updates[k], rtol=1e-6, atol=1e-7)
    assert dion2_state(state).mu["w"].sharding == params["w"].sharding


@pytest.mark.parametrize("whole", [True, False], ids=["dion2", "scale_by_dion2"])
def test_case_12_no_array_aliases_another(whole):
    # Zeros, all slices selected and no decay: the state equals the parameters at first,
    # and every update of scale_by_dion2 its momentum.
    options = dict(newton_schulz_fn=as_it_is, ns_dtype=jnp.float32)
    mesh = make_mesh((8,), "explicit")
    raw = {"v": normal((8, 24)), "w": normal((8, 24), 1)}
    tx = scale_by_dion2(1.0, 1.0, **options)
    if whole:
        raw |= {"b": normal(24)}
        tx = dion2(0.1, 1.0, 1.0, neuron_beta2=0.9, **options)
    grads = {k: place(x, mesh, ("a",)) for k, x in raw.items()}
    params = {k: place(0 * x, mesh, ("a",)) for k, x in raw.items()}
    state = tx.init(params)
    assert_apart(params, state)
    assert_apart(params, jax.jit(tx.init)(params))
    updates, after = tx.update(grads, state, params)
    assert_apart(params, grads, updates, state, after)
    if not whole:
        np.testing.assert_array_equal(updates["w"], after.mu["w"])

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    step = jax.jit(step, donate_argnums=(0, 1, 2))
    for _ in range(2):
        given = jax.tree.leaves((params, state, grads))
        params, state, grads = step(params, state, grads)
        assert all(x.is_deleted() for x in given if x.ndim)
        assert_apart(params, state, grads)
    assert all(np.asarray(x).any() for x in (*params.values(), *grads.values()))


def assert_apart(*trees):
    """No two arrays share memory on any device."""
    places = [
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(trees)
        for shard in x.addressable_shards
    ]
    assert len(set(places)) == len(places)


@pytest.fixture(scope="module")
def saved_on_eight(tmp_path_factory):
    """Where a step of eight devices lies, and the next one: updates and momentum."""
    folder = tmp_path_factory.mktemp("case_13") / "step"
    mesh = make_mesh((8,), "auto")
    specs = {"b": (), "v": ("a",), "w": (None, "a")}
    params, *grads = (
        {k: place(x, mesh, specs[k]) for k, x in leaves(seed).items()}
        for seed in range(3)
    )
    tx = of_every_mesh(shardings_of(params))
    step = jax.jit(tx.update)
    updates, state = step(grads[0], jax.jit(tx.init)(params), params)
    params = optax.apply_updates(params, updates)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, {"params": params, "state": state})
    return folder, params, state, step(grads[1], state, params)


def leaves(seed):
    shapes = {"b": (24,), "v": (16, 24), "w": (32, 16)}
    return {k: normal(shape, (seed, i)) for i, (k, shape) in enumerate(shapes.items())}


def of_every_mesh(shardings):
    return dion2(
        0.1,
        selection="global",
        select_axis="shorter",
        ns_dtype=jnp.float32,
        param_shardings=shardings,
    )


# sizes of the mesh, kind of its axes, specs of v and w
RESTORED_ON = {
    "four": ((4,), "auto", (None, "a"), (None, "a")),
    "two by four": ((2, 4), "auto", (("b", "a"),), (None, "b")),
    "four by two": ((4, 2), "explicit", ("a", "b"), ("a",)),
    "one": ((1,), "auto", (), ()),
}


@pytest.mark.parametrize("name", RESTORED_ON)
def test_case_13_saved_on_eight_devices_restored_on_others(saved_on_eight, name):
    folder, params, state, (next_updates, next_state) = saved_on_eight
    sizes, kind, v, w = RESTORED_ON[name]
    mesh = make_mesh(sizes, kind)
    specs = {"b": (), "v": v, "w": w}
    like = {k: place(x, mesh, specs[k]) for k, x in leaves(0).items()}
    tx = of_every_mesh(needed_shardings(like, kind))
    shapes = jax.tree.map(
        ocp.utils.to_shape_dtype_struct,
        {"params": like, "state": jax.jit(tx.init)(like)},
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder, shapes)
    for found, saved in zip(
        jax.tree.leaves(restored),
        jax.tree.leaves({"params": params, "state": state}),
        strict=True,
    ):
        np.testing.assert_array_equal(found, saved)
    mu = dion2_state(restored["state"]).mu
    for k in "vw":
        for x in (mu[k], restored["params"][k]):
            assert x.sharding.is_equivalent_to(like[k].sharding, 2)

    grads = {k: place(x, mesh, specs[k]) for k, x in leaves(2).items()}
    updates, after = jax.jit(tx.update)(grads, restored["state"], restored["params"])
    for k in "bvw":
        found, expected = float64(updates[k]), float64(next_updates[k])
        assert frobenius(found, expected) <= UPDATE
    for k in "vw":
        found, expected = (float64(dion2_state(s).mu[k]) for s in (after, next_state))
        assert relative(found, expected) <= MOMENTUM


def test_case_14_weight_decay_shrinks():
    params = {"b": jnp.ones(6), "w": jnp.ones((4, 6))}
    tx = dion2(0.01, weight_decay=0.1, adam_weight_decay=0.1)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = update(tx, zero, params)
    for x in optax.apply_updates(params, updates).values():
        np.testing.assert_allclose(x, 0.999, rtol=1e-6)


@pytest.mark.parametrize("whole", [True, False], ids=["dion2", "scale_by_dion2"])
@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32, jnp.bool_])
def test_case_15_what_is_not_real_is_refused_by_name(dtype, whole):
    params = {"v": jnp.ones((4, 6)), "w": jnp.ones((4, 6), dtype)}
    tx = dion2(0.1) if whole else scale_by_dion2()
    with pytest.raises(TypeError, match=f"'w'.*has dtype {jnp.dtype(dtype).name}"):
        tx.init(params)


def test_case_16_weight_decay_follows_its_schedule():
    params = {"b": jnp.ones(6), "w": jnp.ones((4, 6))}
    tx = optax.inject_hyperparams(
        dion2, static_args=STATIC_ARGS, hyperparam_dtype=jnp.float32
    )(
        0.5,
        weight_decay=lambda t: 0.1 * (t + 1),
        adam_weight_decay=lambda t: 0.4 / (t + 1),
    )
    zero = jax.tree.map(jnp.zeros_like, params)
    traces = []

    @jax.jit
    def step(grads, state, params):
        traces.append(None)
        return tx.update(grads, state, params)

    state = tx.init(params)
    left = {"b": 1.0, "w": 1.0}
    for t in range(3):
        updates, state = step(zero, state, params)
        params = optax.apply_updates(params, updates)
        left["w"] *= 1 - 0.5 * 0.1 * (t + 1)
        left["b"] *= 1 - 0.5 * 0.4 / (t + 1)
        for k, x in params.items():
            np.testing.assert_allclose(x, left[k], rtol=1e-6)
    assert len(traces) == 1


def test_case_18_a_convolution_is_its_taps_and_inputs_by_its_outputs():
    kernel, stack = normal((3, 3, 4, 8)), normal((2, 3, 3, 4, 8), 1)
    taps = MuonDimensionNumbers((-4, -3, -2), -1)
    params = {"kernel": kernel, "stack": stack}
    tx = dion2(0.1, ns_dtype=jnp.float32, weight_dimension_numbers=taps)
    found, _ = update(tx, params, params)
    views = [x.reshape(36, 8) for x in (kernel, *stack)]
    tx = dion2(0.1, ns_dtype=jnp.float32)
    expected, _ = update(tx, views, views)
    for x, wanted in zip((found["kernel"], *found["stack"]), expected, strict=True):
        assert frobenius(float64(x).reshape(36, 8), float64(wanted)) <= UPDATE


def test_case_19_the_learning_rate_factor_is_sqrt_of_out_over_in():
    grads = {"w": jnp.asarray(normal((4, 16)))}
    for axes, factor in [((0, 1), 2.0), ((1, 0), 0.5)]:
        tx = dion2(
            *(0.5, 1.0),
            ns_dtype=jnp.float32,
            newton_schulz_fn=as_it_is,
            weight_decay=0.0,
            weight_dimension_numbers=MuonDimensionNumbers(*axes),
        )
        updates, _ = update(tx, grads, grads)
        np.testing.assert_allclose(updates["w"], -0.5 * factor * grads["w"], rtol=1e-6)


# spec on a mesh {a: 8, b: 1}, an entry of param_shardings or None
SPECS = [
    (("b", "a"), None),
    (("b", "a"), (None, "a")),
    ((None, "a"), ("b", "a")),
    ((None, ("a", "b")), None),
    ((None, ("b", "a")), (None, "a")),
]


@pytest.mark.parametrize("spec, entry", SPECS, ids=str)
def test_case_21_an_explicit_mesh_axis_of_length_one_changes_nothing(spec, entry):
    mesh = make_mesh((8, 1), "explicit")
    given = entry and NamedSharding(mesh, P(*entry))
    found, expected = (
        steps_of(mesh, spec, given),
        steps_of(make_mesh((8,), "explicit"), (None, "a"), None),
    )
    for x, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(x, wanted)
        assert np.asarray(x).any()


@functools.cache
def steps_of(mesh, spec, given):
    """Momentum, update and parameters after two steps, used outside of jit as well."""
    params = {
        k: place(normal((16, 24), seed), mesh, spec) for seed, k in enumerate("vw")
    }
    tx = dion2(0.1, newton_schulz_fn=as_it_is, param_shardings=given)
    state, step = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        updates, state = step(params, state, params)
        moved = jax.tree.map(jnp.add, params, updates)
        mu = dion2_state(state).mu
        for k, p in params.items():
            for x in (mu[k], updates[k], moved[k]):
                assert x.sharding.is_equivalent_to(p.sharding, 2)
        params = moved
    return mu, updates, moved
