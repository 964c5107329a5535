"""Right numbers: the recorded trajectories and the oracle, on real sharded arrays."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from goldens import golden_names, load_golden, read_golden
from helpers import (
    KINDS,
    MOMENTUM,
    UPDATE,
    cosine,
    dion2_state,
    float64,
    frobenius,
    make_mesh,
    maybe_set_mesh,
    needed_shardings,
    place,
    random_leaves,
    relative,
    with_dion2_state,
)
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from reference import step as reference_step

from dion2_jax import dion2, scale_by_dion2, shardings_of

RECORDED = [name for name in golden_names() if not name.startswith("scalar_rules")]
EVEN = [name for name in RECORDED if not load_golden(name).uneven]
UNEVEN = [name for name in RECORDED if load_golden(name).uneven]


def kind_of(name):
    """Half of the cases lie on Auto axes, half on Explicit ones; always the same."""
    return KINDS[zlib.crc32(name.encode()) % 2]


def golden_layout(case, kind):
    """The mesh of a case and the partition of each of its leaves."""
    counts = {np.prod(leaf.shards) for leaf in case.leaves}
    (count,) = counts
    sizes = (case.devices // count, count) if count > 1 else (case.devices,)
    axis = "b" if count > 1 else None
    specs = [
        tuple(axis if shards > 1 else None for shards in leaf.shards)
        for leaf in case.leaves
    ]
    return make_mesh(sizes, kind), specs


# --- recorded trajectories ------------------------------------------------------------


@pytest.mark.parametrize("name", EVEN)
def test_golden(name):
    case, kind = load_golden(name), kind_of(name)
    mesh, specs = golden_layout(case, kind)
    dtype = jnp.dtype(case.dtype)

    def placed(arrays):
        return {
            f"w{i}": place(x, mesh, spec, dtype)
            for i, (x, spec) in enumerate(zip(arrays, specs, strict=True))
        }

    params = placed(leaf.init for leaf in case.leaves)
    rates = jnp.array(case.learning_rates, jnp.float32)
    arguments = {} if case.precision == "bf16_ns" else {"ns_dtype": jnp.float32}
    tx = dion2(
        lambda count: rates[count],
        weight_decay=case.weight_decay,
        adjust_lr=case.adjust_lr,
        weight_dimension_numbers={
            f"w{i}": MuonDimensionNumbers(leaf.reduction, leaf.output)
            for i, leaf in enumerate(case.leaves)
        },
        param_shardings=needed_shardings(params, kind),
        **case.args,
        **arguments,
    )

    @jax.jit
    def train_step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for t in range(len(case.learning_rates)):
        if case.dtype == "bfloat16" and t > 0:  # its roundings add up: step from it
            params = placed(leaf.params[t - 1] for leaf in case.leaves)
            mu = placed(leaf.momentum[t - 1] for leaf in case.leaves)
            state = with_dion2_state(state, mu=mu)
        before, mu_before = params, dion2_state(state).mu
        grads = placed(leaf.grads[t] for leaf in case.leaves)
        params, state = train_step(params, state, grads)
        ours = dion2_state(state)
        for i, leaf in enumerate(case.leaves):
            w = f"w{i}"
            kept = np.asarray(mu_before[w]) + np.asarray(grads[w])
            decayed = np.asarray(ours.mu[w]) != kept
            np.testing.assert_array_equal(decayed, leaf.decayed[t])
            recorded = leaf.init if t == 0 else leaf.params[t - 1]
            check_step(
                case,
                float64(params[w]),
                float64(params[w]) - float64(before[w]),
                float64(ours.mu[w]),
                None if ours.nu is None else float64(ours.nu[w]),
                leaf,
                t,
                leaf.params[t].astype(np.float64) - recorded,
            )


def check_step(case, param, moved, mu, nu, leaf, t, expected):
    """One step of one leaf against the record, at the tolerances of its README."""
    tolerances = case.tolerances
    assert relative(mu, leaf.momentum[t]) <= tolerances.momentum
    if nu is not None:
        assert relative(nu, leaf.variance[t]) <= tolerances.variance
        if case.args["selection"] == "global":
            return  # the reference rescales every shard by itself, see golden/README.md
    if not expected.any():
        assert not moved.any()
        return
    assert frobenius(moved, expected) <= tolerances.update
    if tolerances.params is not None:
        assert abs(param - leaf.params[t]).max() <= tolerances.params
    if tolerances.cosine is not None:
        assert cosine(moved, expected) > tolerances.cosine


def test_goldens_lie_on_both_kinds_of_axes():
    for family in ("dion2_core", "dist_rows", "dist_replicated", "dist_batch"):
        names = [name for name in EVEN if name.startswith(family)]
        assert {kind_of(name) for name in names} == set(KINDS)


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_golden_is_refused(name):
    case = load_golden(name)
    mesh, specs = golden_layout(case, kind_of(name))
    leaf, sharding = case.leaves[0], NamedSharding(mesh, PartitionSpec(*specs[0]))
    with pytest.raises(ValueError, match="divi"):
        jax.device_put(jnp.asarray(leaf.init), sharding)
    ((size, count),) = [
        (n, p) for n, p in zip(leaf.init.shape, leaf.shards, strict=True) if p > 1
    ]
    tx = dion2(
        0.1,
        weight_dimension_numbers=MuonDimensionNumbers(leaf.reduction, leaf.output),
        param_shardings=sharding,
    )
    with pytest.raises(ValueError, match=f"size {size} cannot .* {count} equal shards"):
        tx.init({"w": jnp.asarray(leaf.init)})


def test_scalar_rules_golden():
    meta, arrays = read_golden("scalar_rules__adamw")
    names = range(meta["num_params"])
    params = {f"w{i}": jnp.asarray(arrays[f"init_{i}"]) for i in names}
    tx = dion2(
        1.0,
        weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: None, tree),
        adam_learning_rate=meta["lr"],
        adam_b1=meta["betas"][0],
        adam_b2=meta["betas"][1],
        adam_eps=meta["epsilon"],
        adam_weight_decay=meta["weight_decay"],
    )
    state, update = tx.init(params), jax.jit(tx.update)
    for t in range(meta["steps"]):
        grads = {f"w{i}": jnp.asarray(arrays[f"grads_{i}"][t]) for i in names}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        adam = state.inner_states["adam"]
        for i in names:
            w = f"w{i}"
            assert abs(params[w] - arrays[f"params_{i}"][t]).max() < 1e-6
            mu, nu = (
                jax.tree.leaves(optax.tree.get(adam, key))[i] for key in ("mu", "nu")
            )
            assert relative(float64(mu), arrays[f"momentum_{i}"][t]) < 1e-6
            assert relative(float64(nu), arrays[f"variance_{i}"][t]) < 1e-6


# --- sharded arrays against the oracle ------------------------------------------------

FLAT = ("a", "b")
# mesh, axis kinds, matrices, shape (in, out), partition, other arguments
SHARDED = [
    ((1,), "auto", 1, (12, 20), ("a", None), {}),
    ((1,), "explicit", 3, (16, 16), (None, "a"), {}),
    ((8,), "auto", 1, (24, 16), (None, "a"), {}),
    ((8,), "auto", 3, (16, 24), ("a", None), {}),
    ((8,), "explicit", 8, (16, 16), (None, "a"), {}),
    ((8,), "explicit", 11, (32, 16), ("a", None), dict(selection="global")),
    ((8,), "auto", 11, (16, 32), (None, "a"), {}),
    ((8,), "explicit", 3, (24, 16), ("a", None), dict(select_axis="output")),
    ((8,), "auto", 8, (24, 16), (None, "a"), dict(select_axis="reduction")),
    ((4, 2), "auto", 3, (16, 16), (FLAT, None), {}),
    ((4, 2), "explicit", 11, (16, 24), (None, FLAT), {}),
    ((4, 2), "explicit", 1, (24, 16), (FLAT, None), dict(selection="global")),
    ((4, 2), "auto", 8, (24, 16), (None, FLAT), dict(selection="global")),
    ((4, 2), "auto", 3, (24, 16), (FLAT, None), dict(select_axis="shorter")),
    ((4, 2), "explicit", 11, (16, 16), ("a", None), dict(share_replicas=False)),
    ((4, 2), "auto", 3, (32, 16), (None, "b"), dict(max_exchange_bytes=1)),
]
NOT_OF_THE_ORACLE = ("share_replicas", "max_exchange_bytes")


def shard_counts(mesh, spec):
    """Shards along every axis."""
    names = ((e,) if isinstance(e, str) else e or () for e in spec)
    return tuple(int(np.prod([mesh.shape[n] for n in axes])) for axes in names)


def run_steps(tx, params, grads):
    """[(updates, state after)] of the steps."""
    state, update, done = tx.init(params), jax.jit(tx.update), []
    for grad in grads:
        updates, state = update(grad, state)
        done.append((updates, state))
    return done


@pytest.mark.parametrize(
    ("sizes", "kind", "count", "shape", "spec", "arguments"), SHARDED
)
def test_sharded_equals_the_oracle(sizes, kind, count, shape, spec, arguments):
    mesh = make_mesh(sizes, kind)
    raw = [random_leaves(count, shape, seed) for seed in range(2)]
    grads = [{w: place(x, mesh, spec) for w, x in leaves.items()} for leaves in raw]
    params = grads[0]
    tx = scale_by_dion2(
        0.3,
        ns_dtype=jnp.float32,
        param_shardings=needed_shardings(params, kind),
        **arguments,
    )
    done = run_steps(tx, params, grads)
    known = {k: v for k, v in arguments.items() if k not in NOT_OF_THE_ORACLE}
    for w in params:
        mu = np.zeros(shape)
        for leaves, (updates, state) in zip(raw, done, strict=True):
            expected = reference_step(
                *(leaves[w], mu),
                reduction=0,
                output=1,
                shards=shard_counts(mesh, spec),
                fraction=0.3,
                **known,
            )
            mu = expected.mu
            update = float64(updates[w])
            np.testing.assert_array_equal(update != 0, expected.update != 0)
            assert frobenius(update, expected.update) <= UPDATE
            assert relative(float64(state.mu[w]), mu) <= MOMENTUM


@pytest.mark.parametrize(
    ("sizes", "kind", "spec"),
    [
        ((8,), "auto", ("a", None)),
        ((8,), "explicit", (None, "a")),
        ((4, 2), "auto", (None, FLAT)),
        ((4, 2), "explicit", (("b", "a"), None)),
    ],
)
def test_global_selection_of_whole_numbers_is_that_of_one_device(sizes, kind, spec):
    # Scores of whole numbers and halves are exact in any order of summation, and small
    # ones tie all the time: every tie must fall as on one device.
    rng = np.random.default_rng(0)
    shape, mesh = (16, 16), make_mesh(sizes, kind)
    raw = [
        {w: rng.integers(-1, 2, shape).astype(np.float32) for w in ("x", "y", "z")}
        for _ in range(3)
    ]
    axis = "output" if spec[0] is None else "reduction"
    arguments = dict(selection="global", select_axis=axis, ns_dtype=jnp.float32)
    one = scale_by_dion2(0.3, 0.5, **arguments)
    whole = run_steps(one, raw[0], raw)
    grads = [{w: place(x, mesh, spec) for w, x in leaves.items()} for leaves in raw]
    shardings = needed_shardings(grads[0], kind)
    many = scale_by_dion2(0.3, 0.5, param_shardings=shardings, **arguments)
    ties = 0
    for t, ((updates, state), (wanted, whole_state)) in enumerate(
        zip(run_steps(many, grads[0], grads), whole, strict=True)
    ):
        for w in wanted:
            mu, whole_mu = np.asarray(state.mu[w]), np.asarray(whole_state.mu[w])
            np.testing.assert_array_equal(mu, whole_mu)
            found, expected = float64(updates[w]), float64(wanted[w])
            np.testing.assert_array_equal(found != 0, expected != 0)
            assert frobenius(found, expected) <= UPDATE
            if t == 0:
                scores = abs(raw[0][w]).sum(axis=0 if axis == "output" else 1)
                fifth, sixth = np.sort(scores)[::-1][4:6]
                ties += fifth == sixth
    assert ties, "the data should have a tie at the border of the selection"


# --- zeros and dtypes -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "kind", "spec", "arguments"),
    [
        ((1,), "auto", (), {}),
        ((8,), "explicit", ("a", None), {}),
        ((8,), "auto", (None, "a"), dict(neuron_beta2=0.95)),
        ((8,), "explicit", (None, "a"), dict(selection="global")),
        ((4, 2), "auto", ("a", None), dict(ns_method="gram")),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zero_gradient_and_momentum_give_exact_zeros(
    sizes, kind, spec, arguments, dtype
):
    mesh = make_mesh(sizes, kind)
    params = {w: place(jnp.zeros((16, 24)), mesh, spec, dtype) for w in ("x", "y")}
    tx = scale_by_dion2(param_shardings=needed_shardings(params, kind), **arguments)
    for updates, state in run_steps(tx, params, [params, params]):
        for x in jax.tree.leaves((updates, state.mu, state.nu)):
            assert not np.asarray(x).any()  # NaN would be true


@pytest.mark.parametrize("ns_dtype", [jnp.float32, jnp.bfloat16])
def test_zeros_stay_and_next_to_nothing_is_finite_in_the_smallest_matrices(ns_dtype):
    tx = scale_by_dion2(1.0, ns_dtype=ns_dtype)
    update = jax.jit(tx.update)
    for value in (0.0, 1e-30):
        grads = [jnp.full(shape, value) for shape in ((1, 1), (1, 4), (4, 4))]
        updates, state = update(grads, tx.init(grads))
        for u, mu in zip(updates, state.mu, strict=True):
            np.testing.assert_allclose(mu, 0.95 * value, rtol=1e-6)
            # Divided by eps = 1e-8, times the product of the coefficients a: 990.
            np.testing.assert_allclose(u, 990e8 * value, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mu_dtype", [None, jnp.float32])
@pytest.mark.parametrize("grad_dtype", [jnp.bfloat16, jnp.float32])
def test_case_22_bfloat16_state_keeps_dtype_and_sharding_and_is_donated(
    kind, mu_dtype, grad_dtype
):
    mesh = make_mesh((8,), kind)
    specs = {"kernel": ("a", None), "bias": ("a",)}
    shapes = {"kernel": (16, 24), "bias": (24,)}
    rng = np.random.default_rng(0)

    def leaves(dtype):
        return {
            w: place(rng.normal(size=shapes[w]), mesh, specs[w], dtype) for w in specs
        }

    params = leaves(jnp.bfloat16)
    shardings = needed_shardings(params, kind)
    tx = dion2(1e-2, mu_dtype=mu_dtype, param_shardings=shardings)
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    def assert_as_at_first(state):
        """The same dtypes, and shardings of what is not a scalar, as after init."""
        for x, at_first in zip(*map(jax.tree.leaves, (state, first)), strict=True):
            assert (x.dtype, x.weak_type) == (at_first.dtype, at_first.weak_type)
            if x.ndim:
                assert x.sharding.is_equivalent_to(at_first.sharding, x.ndim)

    state = first = tx.init(params)  # eagerly
    assert dion2_state(state).mu["kernel"].dtype == (mu_dtype or jnp.bfloat16)
    for _ in range(3):
        given = jax.tree.leaves((params, state))
        params, state, updates = train_step(params, state, leaves(grad_dtype))
        assert all(x.is_deleted() for x in given)
        assert_as_at_first(state)
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(grad_dtype)}
    assert len(traces) == 1


# --- shardings ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("set_mesh", [False, True])
@pytest.mark.parametrize("jit_init", [False, True])
def test_momentum_and_update_keep_the_sharding_of_the_parameter(
    kind, set_mesh, jit_init
):
    mesh = make_mesh((4, 2), kind)
    specs = {
        "rows": ("a", None),
        "columns": (None, FLAT),
        "stack": ("b", None, "a"),
        "copies": (None, None),
    }
    params = {
        w: place(np.ones((4, 8, 16)[-len(spec) :]), mesh, spec)
        for w, spec in specs.items()
    }
    expected = shardings_of(params)
    tx = scale_by_dion2(
        weight_dimension_numbers=MuonDimensionNumbers(-2, -1),
        param_shardings=needed_shardings(params, kind),
    )
    with maybe_set_mesh(mesh, set_mesh):
        state = (jax.jit(tx.init) if jit_init else tx.init)(params)
        check_shardings(state.mu, expected)
        for update in (tx.update, jax.jit(tx.update)):
            updates, state = update(params, state)
            check_shardings(state.mu, expected)
            check_shardings(updates, expected)


def check_shardings(tree, expected):
    for w, sharding in expected.items():
        found = tree[w].sharding
        assert isinstance(found, NamedSharding)
        assert found.mesh == sharding.mesh
        assert found.is_equivalent_to(sharding, tree[w].ndim), f"{w}: {found}"
