"""Where a leaf lies: read from its type or its entry, and refused when in doubt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

import dion2_jax
from dion2_jax._layout import resolve_layout

P = PartitionSpec
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
PATH, SHAPE = "block/w", (16, 24)
TAKE = "param_shardings=dion2_jax.shardings_of(params)"


def make_mesh(kinds=(AUTO,), sizes=(8,), names=("x", "y")):
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=kinds)


def place(mesh, spec, shape=SHAPE):
    return jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec))


def resolve(x, entry=None, dimensions=(0, 1), select_axis="sharded", **options):
    dimensions = MuonDimensionNumbers(*dimensions)
    (layout,) = resolve_layout(PATH, x, entry, dimensions, None, select_axis, **options)
    return layout


def traced(x, entry=None):
    """The layout of the tracer of `x`."""
    found = []
    jax.eval_shape(jax.jit(lambda x: found.append(resolve(x, entry))), x)
    return found[0]


def check_error(call, *parts, mesh=None, shape=SHAPE):
    """`call` raises a ValueError that names leaf, shape, mesh and all `parts`."""
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    for part in (repr(PATH), str(shape), str(dict(mesh.shape)) if mesh else "", *parts):
        assert part in message, f"{part!r} is not in: {message}"


def shown(*entries):
    """The start of a partition in a message: its name differs between JAX releases."""
    return str(P(*entries)).rstrip(",)")


BOTH = pytest.mark.parametrize("view", [resolve, traced], ids=["array", "tracer"])


@BOTH
def test_explicit_axes_are_read_from_the_type(view):
    layout = view(place(make_mesh((EXPLICIT,)), P(None, "x")))
    assert layout.names == ((), ("x",))
    assert layout.select == (1,) and layout.select_is_output
    assert layout.local_sizes((0, 1)) == (16, 3)


@BOTH
def test_an_entry_gives_the_partition_over_auto_axes(view):
    mesh = make_mesh()
    layout = view(place(mesh, P("x")), NamedSharding(mesh, P("x", None)))
    assert layout.names == (("x",), ()) and layout.mesh == mesh
    assert layout.select == (0,) and not layout.select_is_output


@BOTH
def test_auto_axes_without_an_entry_are_refused(view):
    mesh = make_mesh()
    x = place(mesh, P("x"))
    parts = ("Auto", TAKE, "jax.sharding.PartitionSpec() if it is replicated")
    check_error(lambda: view(x), *parts, mesh=mesh)


@BOTH
def test_an_entry_agrees_with_explicit_axes_up_to_trailing_none(view):
    mesh = make_mesh((EXPLICIT,))
    x = place(mesh, P("x", None))
    assert view(x, NamedSharding(mesh, P("x"))).names == (("x",), ())
    wrong = NamedSharding(mesh, P(None, "x"))
    parts = (shown(None, "x"), f"sharded as {shown('x')}", TAKE)
    check_error(lambda: view(x, wrong), *parts, mesh=mesh)


def test_an_entry_that_the_array_contradicts_on_auto_axes_is_refused():
    mesh = make_mesh()
    x, wrong = place(mesh, P("x")), NamedSharding(mesh, P())
    parts = (f"says {P()}", f"sharded as {shown('x')}", TAKE)
    check_error(lambda: resolve(x, wrong), *parts, mesh=mesh)
    # A tracer cannot know better.
    assert traced(x, wrong).names == ((), ())


@BOTH
def test_one_device_needs_nothing(view):
    layout = view(jnp.zeros(SHAPE))
    assert layout.mesh is None and layout.names == ((), ())
    assert layout.select == (0,) and layout.replicas == ()


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_mesh_axis_of_length_one_is_no_shard(kind):
    mesh = make_mesh((kind,), (1,))
    layout = resolve(place(mesh, P("x")))
    assert layout.mesh_axes((0, 1)) == () and layout.replicas == ()
    assert layout.local_sizes((0, 1)) == SHAPE

    mesh = make_mesh((kind, kind), (8, 1))
    sharding = NamedSharding(mesh, P("y", "x"))
    layout = resolve(place(mesh, P("y", "x")), sharding)
    assert layout.mesh_axes((0, 1)) == ("x",) and layout.local_sizes((0, 1)) == (16, 3)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_inside_shard_map_is_refused(kind):
    mesh = make_mesh((kind,))
    inside = jax.shard_map(
        lambda x: (resolve(x), x)[1], mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    check_error(
        lambda: jax.eval_shape(inside, place(mesh, P("x"))),
        *("inside a shard_map", "call the optimizer outside of it"),
        mesh=mesh,
        shape=(2, 24),
    )


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_bare_partition_takes_the_mesh_that_is_set(kind):
    mesh = make_mesh((kind,))
    x = place(mesh, P("x"))
    with jax.set_mesh(mesh):
        assert resolve(x, P("x")).names == (("x",), ())
        assert dict(traced(x, P("x")).mesh.shape) == {"x": 8}
    check_error(lambda: resolve(x, P("x")), "none is set", "jax.set_mesh(mesh)")


@BOTH
def test_mixed_meshes_need_an_entry_that_agrees(view):
    mesh = make_mesh((EXPLICIT, AUTO), (2, 4))
    x = place(mesh, P("x", "y"))
    check_error(lambda: view(x), "Auto", TAKE, mesh=mesh)
    layout = view(x, NamedSharding(mesh, P("x", "y")))
    assert layout.names == (("x",), ("y",)) and layout.select == (1,)
    wrong = NamedSharding(mesh, P(None, "y"))
    check_error(lambda: view(x, wrong), shown(None, "y"), TAKE, mesh=mesh)


@BOTH
@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")])
def test_mixed_axes_may_share_an_array_axis_in_any_order(view, axes):
    # The type P("x") of P(("y", "x")) does not show the Auto axis before it.
    mesh = make_mesh((EXPLICIT, AUTO), (2, 4))
    layout = view(place(mesh, P(axes)), NamedSharding(mesh, P(axes)))
    assert layout.names == (axes, ())


BAD = {
    "longer than the rank": (P("x", None, None), ("3 entries", "rank 2", TAKE)),
    "axis twice": (P("x", "x"), ("'x' used twice", TAKE)),
    "unknown axis": (P("z"), ("no mesh axis 'z'", TAKE)),
    "open axis": (P(P.UNCONSTRAINED), ("leaves an axis open", "or None")),
}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("spec, parts", BAD.values(), ids=BAD)
def test_partitions_that_are_none(spec, parts, kind):
    mesh = make_mesh((kind,))
    with jax.set_mesh(mesh):
        check_error(lambda: resolve(place(mesh, P("x")), spec), *parts, mesh=mesh)


def test_an_entry_on_another_mesh_is_refused():
    mesh, other = make_mesh(), make_mesh((AUTO, AUTO), (2, 4))
    entry = NamedSharding(other, P("x"))
    parts = ("another mesh", "{'x': 2, 'y': 4}", TAKE)
    check_error(lambda: resolve(place(mesh, P("x")), entry), *parts, mesh=mesh)
    # The same sizes in another order place the shards on other devices.
    devices = np.array(jax.devices()).reshape(4, 2)
    entry = NamedSharding(Mesh(devices, ("y", "x")), P("x"))
    parts = ("another mesh", "{'y': 4, 'x': 2}", TAKE)
    check_error(lambda: resolve(place(other, P("x")), entry), *parts, mesh=other)


def test_case_01_a_size_that_does_not_divide_is_refused():
    mesh, shape = make_mesh(), (18, 2304)
    entry = NamedSharding(mesh, P("x"))
    with pytest.raises(ValueError, match="divi"):  # JAX's own
        place(mesh, P("x"), shape)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    parts = ("size 18", "8 equal shards", "pad it to 24", "replicate it")
    check_error(lambda: resolve(x, entry), *parts, mesh=mesh, shape=shape)


@pytest.mark.parametrize(
    "dimensions, parts",
    {
        (0, 2): ("rank 2", "axes from -2 to 1"),
        (0, -2): ("no axis twice",),
        ((), 1): ("at least one",),
    }.items(),
)
def test_dimension_numbers_that_the_shape_does_not_have(dimensions, parts):
    parts = (*parts, "weight_dimension_numbers")
    check_error(lambda: resolve(jnp.zeros(SHAPE), None, dimensions), *parts)


SELECTED = [
    # partition, select_axis, per neuron, selected axis of [reduction, output]
    (P("x", "y"), "sharded", False, 1),  # 4 shards beat 2
    (P("y", "x"), "sharded", False, 0),
    (P(), "sharded", False, 0),  # no shards: the shorter
    (P(None, "x"), "shorter", False, 0),
    (P("x"), "output", False, 1),
    (P(None, "x"), "reduction", False, 0),
    (P("y"), "sharded", True, 1),
]


@pytest.mark.parametrize("spec, select_axis, neurons, axis", SELECTED)
def test_selected_axis(spec, select_axis, neurons, axis):
    x = place(make_mesh((EXPLICIT, EXPLICIT), (2, 4)), spec)
    layout = resolve(x, select_axis=select_axis, neurons=neurons)
    assert layout.select == (axis,) and layout.other == (1 - axis,)
    assert layout.select_is_output == (axis == 1)


def test_a_tie_selects_the_output_axis():
    assert resolve(jnp.zeros((8, 8))).select_is_output


def test_whole_neurons_cannot_be_selected_along_the_reduction_axis():
    mesh = make_mesh((EXPLICIT,))
    call = lambda: resolve(  # noqa: E731
        place(mesh, P("x")), select_axis="reduction", neurons=True
    )
    check_error(call, "neuron_beta2", "select_axis='output'", mesh=mesh)


def test_mesh_axes_left_over_are_replicas():
    mesh = make_mesh((EXPLICIT, EXPLICIT), (2, 4))
    assert resolve(place(mesh, P("x"))).replicas == ("y",)
    assert resolve(place(mesh, P(("x", "y")))).replicas == ()
    assert resolve(place(mesh, P())).replicas == ("x", "y")


# --- shardings_of ---------------------------------------------------------------------


def test_shardings_of_arrays_shapes_and_numpy():
    mesh = make_mesh()
    rows = NamedSharding(mesh, P("x"))
    shape = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    params = {
        "array": place(mesh, P("x")),
        "shape": jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=rows),
        "nowhere": shape,
        "one": jnp.zeros(SHAPE),
        "numpy": np.zeros(SHAPE),
    }
    assert dion2_jax.shardings_of(params) == {
        "array": rows,
        "shape": rows,
        **dict.fromkeys(("nowhere", "one", "numpy")),
    }


@pytest.mark.parametrize("leaf", [1.0, [2.0], "x"], ids=str)
def test_shardings_of_names_a_leaf_that_is_no_array(leaf):
    with pytest.raises(TypeError) as error:
        dion2_jax.shardings_of({"a": jnp.zeros(2), "block": {"w": leaf}})
    kind = type(jax.tree.leaves(leaf)[0]).__name__
    name = "block/w/0" if isinstance(leaf, list) else PATH
    for part in ("shardings_of needs arrays", f"got {kind}", repr(name)):
        assert part in str(error.value)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad], ids=["jit", "grad"])
def test_shardings_of_tracers_is_refused(transform):
    def inside(w):
        dion2_jax.shardings_of({"block": {"w": w}})
        return w.sum()

    with pytest.raises(TypeError, match=f"Tracer for {PATH!r}: call it outside of jit"):
        transform(inside)(place(make_mesh(), P("x")))


class Scattered(jax.sharding.Sharding):
    """Over all devices, without a mesh."""

    device_set = property(lambda self: set(jax.devices()))
    memory_kind = None

    def check_compatible_aval(self, shape):
        pass


def test_shardings_of_what_names_no_mesh_axes_is_refused():
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=Scattered())
    check_error(
        lambda: dion2_jax.shardings_of({"block": {"w": x}}),
        *("on several devices by a Scattered", "jax.sharding.NamedSharding"),
    )


# --- entries for a whole tree --------------------------------------------------------


def init(params, shardings):
    return dion2_jax.scale_by_dion2(param_shardings=shardings).init(params)


def test_prefixes_in_both_directions():
    mesh = make_mesh()
    rows = NamedSharding(mesh, P("x"))
    params = {"a": {"w": place(mesh, P("x"))}, "b": {"w": place(mesh, P("x"))}}
    for given in (rows, {"a": rows, "b": {"w": rows}}, lambda tree: {"a": rows, **{
        "b": {"w": {"value": rows}}  # one level below, as in an nnx Param
    }}, dion2_jax.shardings_of):  # fmt: skip
        mu = init(params, given).mu
        assert mu["a"]["w"].sharding.is_equivalent_to(rows, 2)
    # The entry below is the leaf's own: another partition there is refused.
    wrong = {"a": rows, "b": {"w": {"value": NamedSharding(mesh, P())}}}
    with pytest.raises(ValueError, match="'b/w'.*says P"):
        init(params, wrong)


def test_a_tree_of_another_structure_is_refused():
    mesh = make_mesh()
    rows = NamedSharding(mesh, P("x"))
    params = {"a": place(mesh, P("x")), "b": place(mesh, P("x"))}
    for given in ({"a": rows, "c": rows}, lambda tree: {"a": rows, "c": rows}):
        with pytest.raises(ValueError) as error:
            init(params, given)
        for part in ("param_shardings has no entry", "'b'", "a prefix of it", "a, c"):
            assert part in str(error.value)
    with pytest.raises(ValueError, match="several entries for the parameter 'a'"):
        init(params, {"a": {"u": rows, "v": rows}, "b": rows})


def test_an_entry_of_another_type_is_refused():
    with pytest.raises(TypeError) as error:
        init({"a": jnp.zeros(SHAPE)}, {"a": "x"})
    for part in ("param_shardings", "'a'", "type str", "'x'", "NamedSharding"):
        assert part in str(error.value)
