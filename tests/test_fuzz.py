"""Every argument crossed with odd values, every place of a tree with odd leaves.

Each combination either works (updates and state as they should be, and finite) or
raises a ValueError or TypeError that names the argument or the leaf. The counts are
printed: `pytest tests/test_fuzz.py`.
"""

import collections
import dataclasses
import decimal
import enum
import fractions
import inspect
import math
import re
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import dion2_jax
from dion2_jax import STATIC_ARGS, describe, dion2, dion3, scale_by_dion2

TREE_ARGUMENTS = (
    *("weight_dimension_numbers", "weight_splits", "weight_decay_mask"),
    "param_shardings",
)
MATRIX = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)


# --- what is asserted of every combination --------------------------------------------


def leaves_of(tree) -> list:
    canonical = jax.dtypes.canonicalize_dtype  # float64 is float32 to JAX
    return [(x.shape, canonical(x.dtype)) for x in jax.tree.leaves(tree)]


def assert_alike(found, wanted):
    """The same structure, shapes and dtypes."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert leaves_of(found) == leaves_of(wanted)


def assert_finite(tree):
    for x in jax.tree.leaves(tree):
        assert np.isfinite(np.asarray(x).astype(np.float64)).all(), str(x)


def trains(tx, params, grads):
    """One step: updates as the gradients are, state as after init."""
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    assert_alike(updates, grads)
    assert_alike(after, state)
    return updates, after


class Count(collections.Counter):
    """How many combinations worked and were refused, and which did neither."""

    def __init__(self):
        super().__init__(worked=0, refused=0)
        self.wrong = []

    def try_(self, what: str, names: tuple[str, ...], call) -> None:
        """`call` works, or raises an error that has one of `names` in its message."""
        try:
            call()
        except (ValueError, TypeError) as error:
            if any(
                re.search(rf"(?<!\w){re.escape(n)}(?!\w)", str(error)) for n in names
            ):
                self["refused"] += 1
            else:
                self.wrong.append(f"{what}: names none of {names}: {error}"[:400])
        except Exception as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}"[:400])
        else:
            self["worked"] += 1

    def tell(self, what: str, capsys) -> None:
        """Fails if one did neither; prints the counts."""
        with capsys.disabled():
            print(
                f"\n{what}: {self.total()} combinations, {self['worked']} worked, "
                f"{self['refused']} were refused by name"
            )
        assert not self.wrong, f"{len(self.wrong)}:\n" + "\n".join(self.wrong)
        assert self["worked"] and self["refused"]


# --- arguments ------------------------------------------------------------------------


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


class Incomparable:
    def __eq__(self, other):
        raise RuntimeError("no ==")

    __hash__ = None  # type: ignore[assignment]


class Unhashable:
    """A function with a value equality, as a dataclass is."""

    def __eq__(self, other):
        return isinstance(other, Unhashable)

    def __call__(self, x):
        return x


Choice = enum.Enum("Choice", "local global")


def one_device(spec) -> NamedSharding:
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, spec)


# Made anew for each use, for generators are used up.
VALUES = {
    # nothing, truth, whole numbers
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "2": lambda: 2,
    "-1": lambda: -1,
    "2**31": lambda: 2**31,
    "2**63": lambda: 2**63,
    "10**400": lambda: 10**400,
    "-10**400": lambda: -(10**400),
    "10**5000": lambda: 10**5000,  # Python refuses to print it
    # numbers
    "0.0": lambda: 0.0,
    "-0.0": lambda: -0.0,
    "0.5": lambda: 0.5,
    "0.999": lambda: 0.999,
    "1.0": lambda: 1.0,
    "1.5": lambda: 1.5,
    "-0.5": lambda: -0.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "1e-300": lambda: 1e-300,
    "1e30": lambda: 1e30,
    "1e39": lambda: 1e39,
    "1e308": lambda: 1e308,
    "1j": lambda: 1j,
    "Fraction": lambda: fractions.Fraction(1, 3),
    "Decimal": lambda: decimal.Decimal("0.5"),
    "np.float16": lambda: np.float16(0.5),
    "np.float32": lambda: np.float32(0.5),
    "np.float64": lambda: np.float64(0.5),
    "np.nan": lambda: np.float32(np.nan),
    "np.int8": lambda: np.int8(1),
    "np.int64": lambda: np.int64(-1),
    "np.uint8": lambda: np.uint8(1),
    "np.bool": lambda: np.bool_(True),
    "np.complex64": lambda: np.complex64(0.5),
    "np.datetime64": lambda: np.datetime64("2026-01-01"),
    # text
    "''": lambda: "",
    "'x'": lambda: "x",
    "'0.5'": lambda: "0.5",
    "'a long text'": lambda: "x" * 10_000,
    "bytes": lambda: b"local",
    "bytearray": lambda: bytearray(b"local"),
    "np.str": lambda: np.str_("local"),
    "np.bytes": lambda: np.bytes_(b"l1"),
    **{
        repr(word): lambda word=word: word
        for word in (
            *("local", "global", "sharded", "shorter", "output", "reduction"),
            *("l1", "l2", "random", "direct", "gram", "auto", "classic", "muon"),
            *("spectral_norm", "rms_norm", "float32", "bfloat16"),
        )
    },
    # containers
    "[]": list,
    "()": tuple,
    "{}": dict,
    "set": set,
    "frozenset": frozenset,
    "[0.5]": lambda: [0.5],
    "(6,)": lambda: (6,),
    "(2, 4)": lambda: (2, 4),
    "[2, 4]": lambda: [2, 4],
    "(2.0, 4.0)": lambda: (2.0, 4.0),
    "(10**400, 1)": lambda: (10**400, 1),
    "(1, 2, 3)": lambda: (1, 2, 3),
    "[(1, 2, 3)]": lambda: [(1.0, 2.0, 3.0)],
    "5 rows": lambda: [(2.0, -1.5, 0.5)] * 5,
    "5 rows of 2": lambda: [(2.0, -1.5)] * 5,
    "5 rows of 1e39": lambda: [(1e39, 0.0, 0.0)] * 5,
    "5 rows of text": lambda: [("a", "b", "c")] * 5,
    "5 rows of arrays": lambda: [jnp.ones(3)] * 5,
    "['local']": lambda: ["local"],
    "{'w': 0.5}": lambda: {"w": 0.5},
    "{'w': None}": lambda: {"w": None},
    "{'w': True, 'b': False}": lambda: {"w": True, "b": False},
    "{1: 'x'}": lambda: {1: "x"},
    "range": lambda: range(3),
    "slice": lambda: slice(3),
    "generator": lambda: (x for x in range(5)),
    "iterator": lambda: iter([]),
    "zip": lambda: zip([1.0] * 5, [2.0] * 5, [3.0] * 5),
    "namedtuple": lambda: optax.EmptyState(),
    "deep": lambda: [[[[[[[[0.5]]]]]]]],
    # functions and types
    "lambda": lambda: lambda: 0.5,
    "identity": lambda: lambda x: x,
    "of nothing": lambda: lambda x: None,
    "of text": lambda: lambda x: "x",
    "of a number": lambda: lambda x: 0.5,
    "of a list": lambda: lambda x: [0.5],
    "of rows": lambda: lambda x: jnp.ones((2, 3)),
    "of two arguments": lambda: lambda x, y: x,
    "unhashable function": Unhashable,
    "len": lambda: len,
    "float": lambda: float,
    "dict": lambda: dict,
    "str.upper": lambda: str.upper,
    "object": object,
    "a class": lambda: Unprintable,
    "Unprintable": Unprintable,
    "Incomparable": Incomparable,
    "Enum": lambda: Choice.local,
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "module": lambda: types,
    # arrays
    "np.array(0.5)": lambda: np.array(0.5),
    "np.array('x')": lambda: np.array("x"),
    "np.array(None)": lambda: np.array(None),
    "np.ones(3)": lambda: np.ones(3),
    "np.ones((5, 3))": lambda: np.ones((5, 3)),
    "np.zeros(0)": lambda: np.zeros(0),
    "np.ma.masked": lambda: np.ma.masked,
    "float32[]": lambda: jnp.float32(0.5),
    "bfloat16[]": lambda: jnp.bfloat16(0.5),
    "float8[]": lambda: jnp.asarray(0.5, jnp.float8_e4m3fn),
    "int32[]": lambda: jnp.int32(1),
    "bool[]": lambda: jnp.bool_(True),
    "complex64[]": lambda: jnp.complex64(0.5),
    "nan[]": lambda: jnp.float32(jnp.nan),
    "float32[3]": lambda: jnp.ones(3),
    "float32[0]": lambda: jnp.zeros(0),
    "key": lambda: jax.random.key(0),
    "raw key": lambda: jax.random.PRNGKey(0),
    "sparse": lambda: sparse.BCOO.fromdense(jnp.eye(3)),
    "ShapeDtypeStruct": lambda: jax.ShapeDtypeStruct((), jnp.float32),
    # dtypes
    "np.float32 type": lambda: np.float32,
    "jnp.bfloat16 type": lambda: jnp.bfloat16,
    "jnp.float8 type": lambda: jnp.float8_e4m3fn,
    "np.dtype": lambda: np.dtype("float16"),
    "structured dtype": lambda: np.dtype([("a", "f4")]),
    # what the arguments given per leaf take
    "axes": lambda: MuonDimensionNumbers(0, 1),
    "axes too far": lambda: MuonDimensionNumbers(5, 6),
    "one axis twice": lambda: MuonDimensionNumbers(0, 0),
    "no axes": lambda: MuonDimensionNumbers((), ()),
    "axes of text": lambda: MuonDimensionNumbers("x", "y"),
    "axes of numbers": lambda: MuonDimensionNumbers(0.0, 1.0),
    "axes of numpy": lambda: MuonDimensionNumbers(np.int64(0), np.int64(1)),
    "axes of bools": lambda: MuonDimensionNumbers(False, True),
    "axes of None": lambda: MuonDimensionNumbers(None, 1),
    "nested axes": lambda: MuonDimensionNumbers((0, (1,)), 1),
    "axes of an array": lambda: MuonDimensionNumbers(np.arange(2), jnp.ones(2)),
    "a tree of axes": lambda: {"w": MuonDimensionNumbers(0, 1), "b": None},
    "a list of axes": lambda: [MuonDimensionNumbers(0, 1)],
    "P()": lambda: P(),
    "P('a')": lambda: P("a"),
    "P('a', 'a')": lambda: P("a", "a"),
    "P(3)": lambda: P(None, None, None),
    "NamedSharding": lambda: one_device(P()),
    "NamedSharding of an axis": lambda: one_device(P("a")),
    "SingleDeviceSharding": lambda: SingleDeviceSharding(jax.devices()[0]),
    "MaskedNode": lambda: optax.MaskedNode(),
}
TRACED = {
    "float": jnp.float32(0.5),
    "int": jnp.int32(1),
    "bool": jnp.bool_(True),
    "complex": jnp.complex64(0.5),
    "vector": jnp.ones(3),
    "matrix": jnp.ones((5, 3)),
}

FUNCTIONS = {
    f.__name__: (f, [n for n in inspect.signature(f).parameters])
    for f in (scale_by_dion2, dion2, dion3)
}
POSITIONAL = {"learning_rate", "fraction", "ef_decay"}


def parameters_of(name: str) -> dict:
    """A matrix, and for the whole optimizers a vector."""
    return {"w": MATRIX} | ({} if name == "scale_by_dion2" else {"b": MATRIX[0]})


def with_argument(name: str, argument: str, value, by_position: bool):
    """The transformation with one argument, the others at their defaults."""
    make, arguments = FUNCTIONS[name]
    if by_position:
        before = {"learning_rate": 0.1, "fraction": 0.25}
        place = arguments.index(argument)
        return make(*(before[a] for a in arguments[:place]), value)
    required = {} if name == "scale_by_dion2" else {"learning_rate": 0.1}
    return make(**(required | {argument: value}))


def ways(name: str):
    """Every argument, by keyword and where it can be by position."""
    for argument in FUNCTIONS[name][1]:
        yield argument, False
        if argument in POSITIONAL:
            yield argument, True


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_value_of_an_argument_works_or_is_refused_by_name(name, capsys):
    count, params = Count(), parameters_of(name)
    for argument, by_position in ways(name):
        names = (argument, *(params if argument in TREE_ARGUMENTS else ()))
        for told, make in VALUES.items():

            def run(make=make, argument=argument, by_position=by_position):
                tx = with_argument(name, argument, make(), by_position)
                if name != "scale_by_dion2" and argument in STATIC_ARGS:
                    # Another program to compile, whose numbers the first one shows.
                    jax.eval_shape(lambda: trains(tx, params, params))
                else:
                    assert_finite(trains(tx, params, params))

            count.try_(f"{argument}={told}", names, run)
        for told, value in TRACED.items():

            def run(value=value, argument=argument, by_position=by_position):
                def traced(v):
                    return trains(
                        with_argument(name, argument, v, by_position), params, params
                    )

                jax.eval_shape(traced, value)

            count.try_(f"{argument}=traced {told}", names, run)
    count.tell(f"{name}, arguments", capsys)


# --- leaves ---------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    first: Any
    second: Any


@dataclasses.dataclass
class Unregistered:
    w: Any


class Duck:
    """Has a shape and a dtype, and is no array."""

    shape, dtype = (4, 6), np.dtype("float32")


DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int4", "int8", "uint8", "int32", "bool", "complex64"),
)
SHAPES = (
    *((), (1,), (6,), (4, 6), (1, 1), (1, 6), (4, 1), (2, 4, 6), (2, 1, 4, 6)),
    *((1, 2, 1, 4, 6), (2, 1, 1, 2, 4, 6), (0,), (0, 6), (4, 0), (0, 0), (0, 4, 6)),
    (2, 0, 6),
)


def numbers(shape, dtype="float32"):
    x = np.random.default_rng(len(shape)).normal(size=shape)
    return jnp.asarray(x).astype(dtype)


LEAVES = {
    **{f"float32{list(s)}": lambda s=s: numbers(s) for s in SHAPES},
    **{f"{d}[4,6]": lambda d=d: numbers((4, 6), d) for d in DTYPES[1:]},
    **{f"{d}[6]": lambda d=d: numbers((6,), d) for d in DTYPES[1:]},
    **{
        f"numpy {d}[4,6]": lambda d=d: np.asarray(numbers((4, 6))).astype(d)
        for d in DTYPES
    },
    "numpy big-endian": lambda: np.ones((4, 6), ">f4"),
    "numpy text": lambda: np.array([["a"] * 6] * 4),
    "numpy objects": lambda: np.full((4, 6), None),
    "numpy structure": lambda: np.zeros((4, 6), [("a", "f4")]),
    "numpy columns": lambda: np.ones((4, 6), np.float32, order="F"),
    "numpy strides": lambda: np.ones((8, 12), np.float32)[::2, ::2],
    "numpy masked": lambda: np.ma.ones((4, 6), np.float32),
    "numpy scalar": lambda: np.float32(0.5),
    "weak": lambda: jnp.asarray(1.0),
    "key": lambda: jax.random.key(0),
    "keys": lambda: jax.random.split(jax.random.key(0), (4, 6)),
    "raw key": lambda: jax.random.PRNGKey(0),
    "sparse": lambda: sparse.BCOO.fromdense(numbers((4, 6))),
    "sparse rows": lambda: sparse.BCSR.fromdense(numbers((4, 6))),
    "ShapeDtypeStruct": lambda: jax.ShapeDtypeStruct((4, 6), jnp.float32),
    "Duck": Duck,
    "None": lambda: None,
    "MaskedNode": lambda: optax.MaskedNode(),
    "int": lambda: 1,
    "float": lambda: 1.0,
    "nan": lambda: math.nan,
    "complex": lambda: 1j,
    "10**5000": lambda: 10**5000,
    "True": lambda: True,
    "str": lambda: "x",
    "bytes": lambda: b"x",
    "function": lambda: jax.nn.relu,
    "generator": lambda: (x for x in range(3)),
    "iterator": lambda: iter([MATRIX]),
    "range": lambda: range(3),
    "set": lambda: {1.0},
    "dtype": lambda: jnp.float32,
    "object": object,
    "Unprintable": Unprintable,
    "Incomparable": Incomparable,
    "Unregistered": lambda: Unregistered(MATRIX),
    "P()": lambda: P(),
    "[]": list,
    "{}": dict,
    "list of lists": lambda: [[1.0, 2.0], [3.0, 4.0]],
    "lists of arrays": lambda: [[MATRIX], [MATRIX, numbers((6,))]],
    "Pair": lambda: Pair(MATRIX, None),
    "Registered": lambda: Registered(MATRIX, numbers((6,))),
}

AXES = MuonDimensionNumbers(-2, -1)
TAKERS = {
    "scale_by_dion2": scale_by_dion2(),
    "dion2": dion2(0.1),
    "dion3, axes": dion3(0.1, weight_dimension_numbers=AXES),
    "dion2, none": dion2(0.1, weight_dimension_numbers=lambda params: None),
}
READERS = {
    "describe": describe,
    "matrix_dimension_numbers": dion2_jax.matrix_dimension_numbers,
}


@pytest.mark.parametrize("name", [*TAKERS, *READERS])
def test_every_leaf_is_a_parameter_or_is_refused_by_name(name, capsys):
    count, good = Count(), {}
    for told, make in LEAVES.items():

        def run(told=told, make=make):
            tree = {"v": MATRIX, "w": make()}
            if name in READERS:
                READERS[name](tree)
                return
            jax.eval_shape(lambda: trains(TAKERS[name], tree, tree))
            good[told] = tree["w"]

        count.try_(told, ("w",), run)
    if name in ("dion2", "dion3, axes"):  # all at once, for one program
        assert_finite(jax.jit(lambda: trains(TAKERS[name], good, good))())
    count.tell(f"{name}, parameters", capsys)


@pytest.mark.parametrize("name", TAKERS)
def test_every_leaf_is_a_gradient_or_is_refused_by_name(name, capsys):
    count, tx = Count(), TAKERS[name]
    params = {"v": MATRIX, "w": MATRIX}
    if name == "dion2":
        params |= {"b": numbers((6,))}
    state = tx.init(params)
    for place in ("w", "b")[: len(params) - 1]:
        for told, make in LEAVES.items():

            def run(make=make, place=place):
                grads = params | {place: make()}

                def step():
                    updates, after = tx.update(grads, state, params)
                    assert_alike(updates, grads)
                    assert_alike(after, state)
                    return updates, after

                jax.eval_shape(step)

            count.try_(f"{place} = {told}", (place,), run)
    count.tell(f"{name}, gradients", capsys)


# --- trees, and what is no tree of them -----------------------------------------------

TREES = {
    "bare": lambda: MATRIX,
    "list": lambda: [MATRIX, MATRIX],
    "lists": lambda: [[MATRIX, MATRIX], [[MATRIX]]],
    "tuple": lambda: (MATRIX, numbers((6,))),
    "Pair": lambda: Pair(MATRIX, numbers((6,))),
    "Registered": lambda: Registered(MATRIX, numbers((6,))),
    "OrderedDict": lambda: collections.OrderedDict(z=MATRIX, a=MATRIX),
    "defaultdict": lambda: collections.defaultdict(list, a=MATRIX),
    "int keys": lambda: {2: MATRIX, 10: MATRIX},
    "tuple keys": lambda: {(1, "a"): MATRIX},
    "empty keys": lambda: {"": {"": MATRIX}},
    "keys with slashes": lambda: {"a": {"b": MATRIX}, "a/b": 2 * MATRIX},
    "deep": lambda: [[[[[[[[{"w": MATRIX}]]]]]]]],
    "one array twice": lambda: {"v": MATRIX, "w": MATRIX},
    "holes": lambda: {"v": None, "w": MATRIX, "u": {}, "t": [], "s": (None,)},
    "None in a list": lambda: [None, MATRIX, None],
    "empty": dict,
    "empty list": list,
    "None alone": lambda: None,
    "nothing": lambda: {"a": {}, "b": [None, ()]},
    **{
        f"{told} alone": LEAVES[told]
        for told in (
            *("key", "sparse", "Duck", "MaskedNode", "int", "10**5000", "str", "bytes"),
            *("function", "generator", "set", "object", "Unprintable", "Unregistered"),
            *("int8[4,6]", "float8_e4m3fn[4,6]", "complex64[4,6]", "float32[]"),
        )
    },
}


@pytest.mark.parametrize("name", [*TAKERS, *READERS])
def test_every_tree_trains_or_is_refused_by_name(name, capsys):
    count = Count()
    for told, make in TREES.items():

        def run(make=make):
            tree = make()
            if name in READERS:
                READERS[name](tree)
            else:
                jax.eval_shape(lambda: trains(TAKERS[name], tree, tree))

        count.try_(told, ("parameter", "parameters"), run)
    count.tell(f"{name}, trees", capsys)


@pytest.mark.parametrize("name", ["scale_by_dion2", "dion2"])
def test_every_state_and_every_set_of_gradients_is_refused_by_name(name, capsys):
    count, tx = Count(), TAKERS[name]
    params = parameters_of(name)
    state = tx.init(params)
    for told, make in VALUES.items():
        count.try_(
            f"state = {told}",
            ("the state that init", "ScaleByDion2State"),
            lambda make=make: tx.update(params, make(), params),
        )
        count.try_(
            f"gradients = {told}",
            ("gradient", "gradients"),
            lambda make=make: tx.update(make(), state, params),
        )
        if name == "dion2":
            count.try_(
                f"params = {told}",
                ("params", "parameter", "parameters", "gradients"),
                lambda make=make: tx.update(params, state, make()),
            )
    count["worked"] += 1  # the state, gradients and parameters that were made for it
    assert_finite(tx.update(params, state, params))
    count.tell(f"{name}, states and gradients", capsys)
