"""Hostile input: what was once seen to break, and what a user has a right to."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    as_it_is,
    collectives_in,
    dion2_state,
    make_mesh,
    place,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import dion2_jax
from dion2_jax import describe, dion2, scale_by_dion2, shardings_of

MATRIX = MuonDimensionNumbers(0, 1)
W, B = jnp.ones((8, 16)), jnp.ones(16)
PARAMS = {"b": B, "w": W}


def dtypes(tree):
    return jax.tree.map(lambda x: x.dtype.name, tree)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def traced_update(tx, grads, params=PARAMS):
    """Shapes of one update, state as `init` makes it; nothing is compiled."""
    state = jax.eval_shape(tx.init, params)
    return jax.eval_shape(tx.update, grads, state, params)


# --- layouts and shapes ---------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(0, 5), (5, 0), (0, 0), (0, 3, 4), (3, 0, 4)], ids=str
)
@pytest.mark.parametrize("score", ["l1", "l2", "random"])
def test_case_04_an_empty_matrix_has_an_empty_update(shape, score):
    """Seen: ZeroDivisionError in make_plan (k = 0); an empty stack fails in to_matrices
    (reshape with -1) once a leaf beside it makes their group not empty; with "l2" on a
    mesh also "zero-size array to reduction operation max".

    Right: case 4, an empty update and an empty momentum; other leaves unharmed.
    """
    params = {"empty": jnp.ones(shape), "w": jnp.ones((3, 4))}
    tx = scale_by_dion2(
        score=score, weight_dimension_numbers=MuonDimensionNumbers(-2, -1)
    )
    updates, _ = traced_update(tx, params, params)
    assert updates["empty"].shape == shape and updates["w"].shape == (3, 4)


def test_a_sharded_empty_matrix_can_be_described():
    """Seen: ZeroDivisionError for the spec along the empty axis, on Auto axes.

    Right: "nothing: empty" in the table, as for empty batch axes.
    """
    mesh = make_mesh((8,), "auto")
    x = jax.ShapeDtypeStruct((0, 8), jnp.float32, sharding=NamedSharding(mesh, P("a")))
    assert describe({"w": x}).rows[0].selects == "nothing: empty"


@pytest.mark.parametrize(
    "place_gradient", [np.asarray, jnp.asarray], ids=["numpy", "one"]
)
def test_gradients_of_one_device_on_explicit_axes(place_gradient):
    """Seen: "in_specs passed to shard_map: P('a', None) does not match P(None, None)",
    a bare ValueError. The same gradients work on Auto axes, replicated ones on both.

    Right: resharded first, like any gradient that lies differently.
    """
    mesh = make_mesh((8,), "explicit")
    values = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
    params = {"w": place(values, mesh, ("a",))}
    tx = scale_by_dion2(ns_dtype=jnp.float32)
    state = tx.init(params)
    wanted, _ = tx.update(params, state)
    found, _ = tx.update({"w": place_gradient(values)}, state)
    np.testing.assert_array_equal(found["w"], wanted["w"])


def test_an_entry_that_a_single_device_array_contradicts_is_refused():
    """Seen: accepted in silence. The momentum lies on one device at first, over eight
    after the update; the update lies otherwise than the parameter; and the top slices
    of eight shards are selected instead of those of the matrix.

    Right: ValueError at init, as for a NamedSharding that says otherwise.
    """
    mesh = make_mesh((8,), "auto")
    tx = scale_by_dion2(param_shardings=NamedSharding(mesh, P("a")))
    with pytest.raises(ValueError, match="'w'.*param_shardings"):
        tx.init({"w": jnp.ones((16, 24))})


@pytest.mark.parametrize("kind", ["reversed", "other half", "explicit"])
def test_an_entry_on_a_mesh_of_other_devices_is_refused(kind):
    """Seen: init succeeds, since only the mesh's axis sizes are compared. Update then
    fails deep in JAX ("Received incompatible devices for jitted computation", or
    "in_specs passed to shard_map" for other axis types), without the leaf's name.

    Right: ValueError at init that names leaf, both meshes and shardings_of.
    """
    devices = np.array(jax.devices())
    own = Mesh(devices[:4], ("a",))
    other = {
        "reversed": Mesh(devices[:4][::-1], ("a",)),
        "other half": Mesh(devices[4:], ("a",)),
        "explicit": Mesh(devices[:4], ("a",), axis_types=(AxisType.Explicit,)),
    }[kind]
    params = {"w": place(np.ones((16, 24)), own, ("a",))}
    tx = scale_by_dion2(param_shardings=NamedSharding(other, P("a")))
    with pytest.raises(ValueError, match="'w'.*mesh.*shardings_of"):
        tx.update(params, tx.init(params))


def test_momentum_of_an_auto_axis_before_an_explicit_one_keeps_its_sharding():
    """Seen: P('x', None) where the parameter has P(('y', 'x'), None): x * 0 drops the
    Auto axis, zeros_like does not. Momentum is four times as large on every device, and
    an eager update then refuses it and asks for the shardings that were given.

    Right: the parameter's sharding after init (test_layout reads this partition only).
    """
    mesh = jax.make_mesh(
        (2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto)
    )
    w = jax.device_put(jnp.ones((16, 24)), NamedSharding(mesh, P(("y", "x"))))
    tx = scale_by_dion2(param_shardings=shardings_of({"w": w}))
    mu = tx.init({"w": w}).mu["w"]
    assert mu.sharding.is_equivalent_to(w.sharding, 2), mu.sharding


def test_a_gradient_on_an_auto_axis_before_an_explicit_one_stays_where_it_lies():
    """Seen: an all-gather and two collective-permutes of the whole gradient a step: it
    was resharded to P('x'), which is all that its type showed already, and lost 'y'.

    Right: the two all-to-alls that `describe` counts, and what JAX itself needs to pass
    gradient and momentum to any shard_map: nothing, but in 0.12 a gather of each.
    """
    mesh = jax.make_mesh(
        (2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto)
    )
    spec = P(("y", "x"))
    w = jax.device_put(jnp.ones((16, 24)), NamedSharding(mesh, spec))
    arguments = dict(ns_dtype=jnp.float32, param_shardings=shardings_of(w))
    tx = scale_by_dion2(**arguments)
    bare = jax.shard_map(lambda *x: x, mesh=mesh, in_specs=spec, out_specs=spec)
    number, size = counted(tx.update, w, tx.init(w))
    assert number == counted(bare, w, w)[0] + Counter({"all-to-all": 2})
    assert size["all-to-all"] == describe(w, **arguments).total.bytes


def counted(function, *arguments):
    """Number and result bytes of every kind of collective."""
    return collectives_in(jax.jit(function).lower(*arguments).compile().as_text())


def test_parameters_of_no_certain_device_train_beside_a_sharded_batch():
    """Seen: "Received incompatible devices for jitted computation": momentum was
    committed to the device of its parameter, which itself was not. Parameters straight
    from Flax's init and a batch over eight devices are how data parallelism starts.

    Right: as with optax.adamw, the step runs where the batch lies.
    """
    mesh = make_mesh((8,), "auto")
    params = {"w": jnp.asarray(numbers(16, 24))}
    batch = place(numbers(8, 16), mesh, ("a",))
    tx = scale_by_dion2(
        newton_schulz_fn=as_it_is, param_shardings=NamedSharding(mesh, P())
    )

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(lambda p: jnp.sum(jnp.square(batch @ p["w"])))(params)
        return tx.update(grads, state)

    state = tx.init(params)
    assert not any(x.committed for x in jax.tree.leaves(state))
    updates, state = step(params, state, batch)
    assert state.mu["w"].sharding.device_set == set(jax.devices())
    assert np.any(np.asarray(updates["w"]))


# --- dtypes ---------------------------------------------------------------------------


def test_updates_have_the_gradient_dtype_with_float32_parameters():
    """Seen: {'b': bfloat16, 'w': float32}: weight decay promotes the matrices' half.
    optax.apply_if_finite and lax.cond then fail: "cond branches must have equal output
    types".

    Right: the gradient's dtype, as the docstrings say.
    """
    grads = cast(PARAMS, jnp.bfloat16)
    updates, _ = traced_update(dion2(0.1), grads)
    assert dtypes(updates) == dtypes(grads)


def test_apply_if_finite_with_bfloat16_gradients_of_float32_parameters():
    """Seen and right: as above, met by a user."""
    tx = optax.apply_if_finite(dion2(0.1), max_consecutive_errors=3)
    grads = cast(PARAMS, jnp.bfloat16)
    updates, _ = traced_update(tx, grads)
    assert dtypes(updates) == dtypes(grads)


def test_injected_float32_hyperparameters_keep_the_gradient_dtype():
    """Seen: with hyperparam_dtype=float32, which README asks for beside bfloat16
    parameters, the matrices' updates are float32 and AdamW's bfloat16; apply_if_finite
    and lax.cond fail as above. weight_decay=np.float32(0.1) alone does the same.

    Right: the gradient's dtype.
    """
    params = cast(PARAMS, jnp.bfloat16)
    tx = optax.inject_hyperparams(
        dion2, static_args=dion2_jax.STATIC_ARGS, hyperparam_dtype=jnp.float32
    )(0.1)
    updates, _ = traced_update(tx, params, params)
    assert dtypes(updates) == dtypes(params)


def test_float64_momentum_decays_by_the_whole_number():
    """Seen: 0.949999988, ef_decay goes through float32. Finite float64 gradients of
    1e60 give NaN, since the selected slices travel in float32 at best.

    Right: float64 momentum, which FLOATS allows, to float64 rounding.
    """
    with jax.enable_x64(True):
        params = {"w": jnp.ones((8, 16), jnp.float64)}
        tx = scale_by_dion2(fraction=1.0)
        _, state = tx.update(params, tx.init(params))
        assert float(state.mu["w"][0, 0]) == 0.95


def test_random_selection_follows_seed_and_step_whatever_x64_is():
    """Seen: other slices under jax_enable_x64: the uniform numbers become float64.

    Right: "reproducible from seed and step", and float32 as the docstring says.
    """
    from dion2_jax._selection import random_scores

    plain = random_scores(0, 1, (2, 0), (64,))
    with jax.enable_x64(True):
        wide = random_scores(0, 1, (2, 0), (64,))
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(plain, wide)


def test_an_infinite_slice_does_not_hide_under_l2():
    """Seen: inf / inf is a NaN with its sign bit set on a CPU, which top_k puts last.
    So the slice is never selected again: the update stays finite, the slice is frozen
    and its momentum infinite for ever. Under "l1" it is selected and shows.

    Right: an infinite norm ranks first, as its limit does.
    """
    from dion2_jax._selection import slice_scores

    x = jnp.asarray([[1.0, 2.0], [jnp.inf, 1.0], [3.0, 4.0]])
    assert slice_scores(x, (1,), "l2")[1] == jnp.inf


def test_weakly_typed_parameters_do_not_trace_twice():
    """Seen: two traces with a parameter jnp.asarray(1.0): AdamW's moments lose their
    weak type at the first update. `_stable` is there to prevent the second compilation.

    Right: state as after init, weak type included.
    """
    params = {"w": W, "scale": jnp.asarray(1.0)}
    assert params["scale"].weak_type
    tx = dion2(0.1)
    state = jax.eval_shape(tx.init, params)
    _, after = jax.eval_shape(tx.update, params, state, params)
    weak = [x.weak_type for x in jax.tree.leaves(state)]
    assert [x.weak_type for x in jax.tree.leaves(after)] == weak


# --- trees ----------------------------------------------------------------------------


def test_custom_key_types():
    """Seen: RuntimeError: generator raised StopIteration, from _plain, for a class
    registered with plain strings as keys. JAX allows any object with a str there.

    Right: str(key) where a key is none of JAX's four.
    """

    class Block:
        def __init__(self, w):
            self.w = w

    jax.tree_util.register_pytree_with_keys(
        Block, lambda x: ((("w", x.w),), None), lambda _, children: Block(*children)
    )
    assert scale_by_dion2().init(Block(W)).mu.w.shape == W.shape


def test_a_plain_tuple_of_axes_is_told_to_be_dimension_numbers():
    """Seen: "weight_dimension_numbers has several entries for the parameter 'w': give a
    tree of the parameters' structure": it is one.

    Right: MuonDimensionNumbers by name, which is the fix.
    """
    with pytest.raises((TypeError, ValueError), match="MuonDimensionNumbers"):
        scale_by_dion2(weight_dimension_numbers={"w": (0, 1)}).init({"w": W})


@pytest.mark.parametrize(
    "grads", [{"w": W}, PARAMS | {"z": W}, [B, W]], ids=["missing", "extra", "list"]
)
@pytest.mark.parametrize("whole", [True, False], ids=["dion2", "scale_by_dion2"])
def test_gradients_of_another_structure_are_said_to_be_so(whole, grads):
    """Seen: "pytree structure error ... at key path tree_map tree" from optax, or "Dict
    key mismatch; expected keys": neither says that it is about gradients or momentum.

    Right: a ValueError that speaks of the gradients and names what is missing or extra.
    """
    tx, params = dion2(0.1), PARAMS
    if not whole:
        tx, params = scale_by_dion2(), {"b": W, "w": W}
    with pytest.raises(ValueError, match="gradient"):
        traced_update(tx, grads, params)


def test_a_gradient_of_the_wrong_shape_is_named_in_the_adamw_half_too():
    """Seen: "add got incompatible shapes for broadcasting: (3,), (16,)".

    Right: the same message as for a matrix, which names leaf and both shapes.
    """
    with pytest.raises(ValueError, match="'b'.*gradient"):
        traced_update(dion2(0.1), {"w": W, "b": B[:3]})


def test_parameters_of_another_shape_do_not_broadcast():
    """Seen: params["w"] of shape [1, 16] beside a gradient and momentum of [8, 16] is
    broadcast by the weight decay, in silence.

    Right: ValueError that names the leaf and both shapes.
    """
    tx = dion2(0.1)
    state = jax.eval_shape(tx.init, PARAMS)
    with pytest.raises(ValueError, match="'w'"):
        jax.eval_shape(tx.update, PARAMS, state, PARAMS | {"w": W[:1]})


# --- arguments ------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["no", -1.0, np.nan, {"w": "no", "b": True}], ids=str)
def test_a_weight_decay_mask_of_anything_is_refused(mask):
    """Seen: any object passes and counts as true: "no" decays everything.

    Right: TypeError that names weight_decay_mask; bools (a tree, a prefix, a callable).
    """
    with pytest.raises(TypeError, match="weight_decay_mask"):
        traced_update(dion2(0.1, weight_decay_mask=mask), PARAMS)


def test_a_weight_decay_mask_of_another_structure_is_named():
    """Seen: "pytree structure error ... tree_map tree": not which argument.

    Right: ValueError that names weight_decay_mask and the leaf.
    """
    with pytest.raises(ValueError, match="weight_decay_mask"):
        traced_update(dion2(0.1, weight_decay_mask={"w": True}), PARAMS)


# --- describe -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "leaf", [np.ones((4, 4), np.int32), jax.random.key(0)], ids=["int", "key"]
)
def test_describe_refuses_what_init_refuses(leaf):
    """Seen: the table gives an int leaf to adamw, but dion2.init raises for it; for a
    PRNG key "Cannot interpret 'key<fry>' as a data type".

    Right: "Raises: as dion2 and its init would": the same TypeError, with the leaf.
    """
    params = {"w": W, "n": jnp.asarray(leaf)}
    with pytest.raises(TypeError) as refused:
        dion2(0.1).init(params)
    with pytest.raises(TypeError, match=re.escape(str(refused.value))):
        describe(params)


def test_describe_takes_the_numpy_arrays_that_dion2_takes():
    """Seen: TypeError "shardings_of needs arrays, got ndarray: call it outside of jit";
    the user called describe, outside of jit.

    Right: one device, as init reads them.
    """
    params = {"w": np.ones((8, 16), np.float32)}
    jax.eval_shape(dion2(0.1).init, params)
    assert describe(params).rows[0].taken_by == "dion2"


def test_describe_names_itself_in_errors_about_its_arguments():
    """Seen: "dion2() got an unexpected keyword argument 'foo'".

    Right: describe(), which is what was called.
    """
    with pytest.raises(TypeError, match=r"describe.*'foo'"):
        describe(PARAMS, foo=1)


@pytest.mark.parametrize("absent", [None, optax.MaskedNode()], ids=["None", "masked"])
@pytest.mark.parametrize("name", ["v", "b"])
@pytest.mark.parametrize("neurons", [None, 0.9])
def test_case_10_an_absent_gradient_leaves_its_leaf_alone(name, absent, neurons):
    """Seen: "pytree structure error ... tree_map tree['v']" from inside Optax.

    Right: its update is as absent, its state what it was, the others as ever.
    """
    params = PARAMS | {"v": 2 * W}
    tx = dion2(0.1, neuron_beta2=neurons)
    _, state = tx.update(params, tx.init(params), params)
    found, kept = tx.update(params | {name: absent}, state, params)
    wanted, moved = tx.update(params, state, params)
    assert found[name] == absent
    for other in {*params} - {name}:
        np.testing.assert_array_equal(found[other], wanted[other])
    for path, leaf in jax.tree_util.tree_leaves_with_path(kept):
        old, new = (
            dict(jax.tree_util.tree_leaves_with_path(tree))[path]
            for tree in (state, moved)
        )
        own = jax.tree_util.DictKey(name) in path
        np.testing.assert_array_equal(leaf, old if own else new)
        if own:
            assert (np.asarray(old) != np.asarray(new)).any()


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_an_absent_gradient_under_mu_keeps_no_other_momentum():
    """An absent gradient of `mu/w` also resets the momentum of `w`.

    Seen: `w` gets its update, but its momentum stays zero: the state's path
    `mu/w` of the momentum of `w` ends with the path of the parameter `mu/w`.
    Right: what is skipped is told by the whole path, below the state's own field.
    """
    params = {"mu": {"w": jnp.ones((8, 16))}, "w": jnp.asarray(numbers(8, 16))}
    tx = dion2(0.1)
    grads = {"mu": {"w": None}, "w": params["w"]}
    updates, state = tx.update(grads, tx.init(params), params)
    assert np.any(np.asarray(updates["w"]))
    assert np.any(np.asarray(dion2_state(state).mu["w"]))


def test_an_absent_gradient_of_a_parameter_named_count_stops_no_clock():
    """An absent gradient of a parameter `count` stops every step count.

    Seen: count 0 after a step (schedules, Adam's bias correction and random scores
    stand still). Right: 1, as with a parameter of any other name.
    """
    params = {"count": jnp.ones((8, 16)), "w": jnp.asarray(numbers(8, 16))}
    tx = dion2(0.1)
    grads = params | {"count": None}
    _, state = tx.update(grads, tx.init(params), params)
    assert int(dion2_state(state).count) == 1


def test_groups_of_two_meshes_have_two_names_in_the_table():
    """`describe` numbers the groups of every mesh from 0.

    Seen: `#0` for two leaves on two meshes, which share no exchange.
    Right: leaves have one number only if they travel together.
    """
    params = {
        "v": place(numbers(16, 48), make_mesh((8,), "auto"), ("a",)),
        "w": place(numbers(16, 48), make_mesh((2, 4), "auto", ("x", "y")), ("x", "y")),
    }
    v, w = describe(params).rows
    assert v.exchange.split()[0] != w.exchange.split()[0]


def test_what_does_not_travel_has_no_rounds():
    """Matrices that never leave their device are cut into rounds of an exchange.

    Seen: `none 2 rounds`, and Newton-Schulz traced twice: `max_exchange_bytes`, "the
    largest buffer of one all-to-all", is held against the stack of local matrices.
    Right: one round, or words in the docstring that say that it bounds these too.
    """
    x = jax.ShapeDtypeStruct((64, 256, 512), jnp.bfloat16)
    (row,) = describe(
        {"experts": x},
        weight_dimension_numbers=MuonDimensionNumbers(1, 2),
        max_exchange_bytes=32 * 64 * 512 * 2,
    ).rows
    assert "rounds" not in row.exchange


@pytest.mark.parametrize(
    "splits, words",
    [((48, 0), "positive"), ((16.0, 32.0), "int"), ((True, 47), "int")],
)
def test_splits_of_a_wrong_entry_are_said_to_be_wrong(splits, words):
    """A tuple that is no tuple of ints is taken for a tree without entries.

    Seen: "weight_splits has no entry for the parameter 'a/w' ... It has entries for:
    a/0, a/1" and for (48, 0) "must be positive and sum to 48, but sum to 48". Right:
    name the number that is wrong.
    """
    with pytest.raises((TypeError, ValueError)) as caught:
        dion2(0.1, weight_splits={"a": splits}).init({"a": {"w": jnp.ones((16, 48))}})
    assert words in str(caught.value) and "no entry" not in str(caught.value)
    assert "48, but sum to 48" not in str(caught.value)


def test_blocks_of_a_permuted_output_are_scaled_in_its_order():
    """Seen: nothing failed where `along_output` lost its transpose.

    The output is (axis 2, axis 1), in that order: the first block is the first slices
    of axis 2.
    """
    x = jnp.asarray(numbers(6, 4, 8))
    arguments = dict(
        weight_splits=(8, 24),
        weight_dimension_numbers=MuonDimensionNumbers(0, (2, 1)),
        weight_decay=0.0,
        fraction=1.0,
    )
    found = {}
    for adjust in ("spectral_norm", None):
        tx = dion2(1.0, adjust_lr=adjust, **arguments)
        found[adjust] = np.asarray(tx.update(x, tx.init(x), x)[0])
    ratio = found["spectral_norm"] / found[None]
    np.testing.assert_allclose(ratio[:, :, :2], np.sqrt(8 / 6), rtol=1e-5)
    np.testing.assert_allclose(ratio[:, :, 2:], np.sqrt(24 / 6), rtol=1e-5)
