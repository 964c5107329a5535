"""dion2 inside Optax's wrappers: each gives the numbers of a plain update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small import (
    assert_close,
    assert_sharded_alike,
    make_optimizer,
    mesh_of,
    optimizer,
    place,
    plain_steps,
)

import dion2_jax


@pytest.fixture(params=["auto", "explicit"])
def mesh(request):
    mesh = mesh_of(request.param)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def params(mesh):
    return place(mesh, 0)


@pytest.fixture
def grads(mesh):
    return [place(mesh, seed) for seed in (1, 2)]


def momentum(state):
    """The momenta of the matrices, a list."""
    found = []
    for s in jax.tree.leaves(
        state, is_leaf=lambda s: isinstance(s, dion2_jax.ScaleByDion2State)
    ):
        if isinstance(s, dion2_jax.ScaleByDion2State):
            found += jax.tree.leaves(s.mu)
    return found


def test_eager_and_jitted_init_agree_and_keep_shardings(params, grads):
    tx = optimizer(params)
    eager, jitted = tx.init(params), jax.jit(tx.init)(params)
    assert_close(eager, jitted, atol=0, zero=True)
    matrices = [params["v"], params["w"]]
    assert_sharded_alike(momentum(eager), matrices)
    assert_sharded_alike(momentum(jitted), matrices)
    updates, state = tx.update(grads[0], eager, params)
    assert_close(jax.jit(tx.update)(grads[0], jitted, params), (updates, state))
    assert_sharded_alike(updates, params)
    assert_sharded_alike(momentum(state), matrices)


def test_chain_with_clipping_equals_clipped_gradients(params, grads):
    tx = optimizer(params)
    norm = jnp.sqrt(sum((g * g).sum() for g in grads[0].values()))
    clipped = jax.tree.map(lambda g: g / norm, grads[0])
    chained = optax.chain(optax.clip_by_global_norm(1.0), tx)
    wanted, state = plain_steps(tx, params, [clipped])
    found, (_, inner) = plain_steps(chained, params, [grads[0]])
    assert_close(found, wanted)
    assert_close(inner, state)


@pytest.mark.parametrize("kind", ["dict", "list", "nnx"])
def test_case_08_partition_with_callable_labels(params, grads, kind):
    def wrap(tree, leaf=lambda x: x):
        if kind == "list":
            return [leaf(tree[k]) for k in "bvw"]
        tree = {k: leaf(x) for k, x in tree.items()}
        return nnx.State(tree) if kind == "nnx" else tree

    variable = nnx.Param if kind == "nnx" else lambda x: x
    tree = wrap(params, variable)
    shardings = dion2_jax.shardings_of(tree)
    tx = optax.partition(
        {
            "matrix": dion2_jax.dion2(
                0.1, ns_dtype=jnp.float32, param_shardings=shardings
            ),
            "vector": optax.sgd(0.5),
        },
        lambda t: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", t),
    )
    as_pure = getattr(nnx, "as_pure", None) or nnx.pure  # until Flax 0.12.6
    state = as_pure(tx.init(tree))  # what nnx.Optimizer hands to update
    updates, _ = jax.jit(tx.update)(wrap(grads[0]), state, wrap(params))
    plain, _ = optimizer(params).update(
        grads[0], optimizer(params).init(params), params
    )
    wanted = plain | {"b": -0.5 * grads[0]["b"]}
    assert_close(updates, wrap(wanted))


def test_masked_leaf_passes_its_gradient_through(params, grads):
    tx = optimizer(params)
    masked = optax.masked(tx, {"b": True, "v": False, "w": True})
    updates, state = masked.update(grads[0], masked.init(params), params)
    wanted, _ = tx.update(grads[0], tx.init(params), params)
    assert_close(updates, wanted | {"v": grads[0]["v"]})
    assert len(momentum(state)) == 1


@pytest.mark.parametrize("leaf", [None, optax.MaskedNode()], ids=str)
def test_case_10_a_leaf_that_is_none_or_masked_is_passed_through(params, grads, leaf):
    tx = optimizer(params)
    wanted, _ = tx.update(grads[0], tx.init(params), params)
    for name in "bv":
        partial = params | {name: leaf}
        updates, _ = tx.update(grads[0] | {name: leaf}, tx.init(partial), partial)
        assert_close(updates, wanted | {name: leaf})


@pytest.mark.parametrize("leaf", [None, optax.MaskedNode()], ids=str)
def test_case_10_a_gradient_that_is_none_or_masked_leaves_its_momentum_alone(
    params, grads, leaf
):
    matrices = {k: params[k] for k in "vw"}
    tx = dion2_jax.scale_by_dion2(
        ns_dtype=jnp.float32, param_shardings=dion2_jax.shardings_of(matrices)
    )
    first = {k: grads[0][k] for k in "vw"}
    _, before = tx.update(first, tx.init(matrices))
    both, _ = tx.update(first, before)
    updates, after = tx.update(first | {"v": leaf}, before)
    assert_close(updates, both | {"v": leaf})
    assert_close(after.mu["v"], before.mu["v"], atol=0)


def test_multi_steps_equals_one_step_of_the_mean(params, grads):
    tx = optimizer(params)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    wanted, state = plain_steps(tx, params, [mean])
    found, accumulated = plain_steps(optax.MultiSteps(tx, 2), params, grads)
    assert_close(found, wanted)
    assert_close(accumulated.inner_opt_state, state)


def test_apply_if_finite_skips_a_bad_gradient(params, grads):
    tx = optimizer(params)
    bad = grads[0] | {"w": grads[0]["w"] * jnp.nan}
    guarded = optax.apply_if_finite(tx, max_consecutive_errors=3)
    found, state = plain_steps(guarded, params, [grads[0], bad, grads[1]])
    wanted, inner = plain_steps(tx, params, grads)
    assert_close(found, wanted)
    assert_close(state.inner_state, inner)
    assert int(state.total_notfinite) == 1


def test_injected_schedules_are_followed(params, grads):
    schedules = {
        "learning_rate": lambda t: 0.1 / (1.0 + t),
        "ef_decay": lambda t: 0.9 - 0.4 * t,
        "weight_decay": lambda t: 0.3 * t,
    }
    shardings = dion2_jax.shardings_of(params)
    injected = optax.inject_hyperparams(
        dion2_jax.dion2,
        static_args=dion2_jax.STATIC_ARGS,
        hyperparam_dtype=jnp.float32,
    )(**schedules, ns_dtype=jnp.float32, param_shardings=shardings)
    state = injected.init(params)
    plain = optimizer(params).init(params)
    traces = []

    @jax.jit
    def update(*args):
        traces.append(None)
        return injected.update(*args)

    for t, g in enumerate([*grads, grads[0]]):
        updates, state = update(g, state, params)
        values = {name: f(t) for name, f in schedules.items()}
        wanted, plain = jax.jit(optimizer(params, **values).update)(g, plain, params)
        assert_close(updates, wanted)
        for name, value in values.items():
            assert float(state.hyperparams[name]) == pytest.approx(value, abs=1e-6)
    assert len(traces) == 1


def test_map_params_finds_every_momentum(params, grads):
    tx = optimizer(params)
    _, state = plain_steps(tx, params, grads[:1])
    mapped = optax.tree.map_params(tx, lambda x: x * 2, state)
    for found, before in zip(momentum(mapped), momentum(state), strict=True):
        np.testing.assert_array_equal(found, 2 * before)
    again = optax.tree.map_params(tx, lambda x: x / 2, mapped)
    assert_close(again, state, atol=0)


def test_scan_equals_a_loop(params, grads):
    tx = optimizer(params)
    wanted = plain_steps(tx, params, grads)

    def body(carry, g):
        p, state = carry
        updates, state = tx.update(g, state, p)
        return (optax.apply_updates(p, updates), state), None

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    carry = (params, tx.init(params))
    found, _ = jax.jit(lambda c, g: jax.lax.scan(body, c, g))(carry, stacked)
    assert_close(found, wanted)


def test_cond_takes_either_branch(params, grads):
    tx = optimizer(params)
    _, state = plain_steps(tx, params, grads[1:])

    @jax.jit
    def maybe(on):
        return jax.lax.cond(
            on,
            lambda: tx.update(grads[0], state, params),
            lambda: (jax.tree.map(lambda g: 0 * g, grads[0]), state),
        )

    assert_close(maybe(True), tx.update(grads[0], state, params))
    assert_close(maybe(False)[1], state, atol=0)


def test_eval_shape_tells_init_and_update(params, grads):
    tx = optimizer(params)
    state = tx.init(params)
    shapes = lambda t: jax.tree.map(lambda x: (x.shape, x.dtype), t)  # noqa: E731
    assert shapes(jax.eval_shape(tx.init, params)) == shapes(state)
    told = jax.eval_shape(tx.update, grads[0], state, params)
    assert shapes(told) == shapes(tx.update(grads[0], state, params))


def test_extra_arguments_are_ignored(params, grads):
    tx = optimizer(params)
    state = tx.init(params)
    wanted = tx.update(grads[0], state, params)
    found = tx.update(grads[0], state, params, value=jnp.float32(3), other="x")
    assert_close(found, wanted, atol=0)


def test_fresh_transformation_takes_an_old_state(params, grads):
    wanted = plain_steps(optimizer(params), params, grads)
    middle, state = plain_steps(optimizer(params), params, grads[:1])
    make_optimizer.cache_clear()
    updates, state = jax.jit(optimizer(params).update)(grads[1], state, middle)
    assert_close((optax.apply_updates(middle, updates), state), wanted)


@pytest.mark.parametrize("jitted_init", [False, True])
def test_one_trace_with_params_and_state_donated(params, grads, jitted_init):
    tx = optimizer(params)
    wanted = plain_steps(tx, params, [*grads, grads[0]])
    traces = []

    def step(p, state, g):
        traces.append(None)
        updates, state = tx.update(g, state, p)
        return optax.apply_updates(p, updates), state

    run = jax.jit(step, donate_argnums=(0, 1))
    state = (jax.jit(tx.init) if jitted_init else tx.init)(params)
    p = jax.tree.map(jnp.copy, params)
    for g in [*grads, grads[0]]:
        old = [p["w"], *momentum(state)]
        p, state = run(p, state, g)
        assert all(x.is_deleted() for x in old)
    assert_close((p, state), wanted)
    assert len(traces) == 1
