"""Every kind of sharding against the oracle, on whole trees, two steps long."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    KINDS,
    MOMENTUM,
    UPDATE,
    assert_copies_agree,
    assert_costs,
    collectives_in,
    float64,
    frobenius,
    make_mesh,
    needed_shardings,
    place,
    relative,
)
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from reference import step as reference_step

from dion2_jax import _exchange, describe, scale_by_dion2, shardings_of
from dion2_jax._leaves import resolve_layouts
from dion2_jax._settings import plans_by_mesh, read_settings

KERNEL = (0, 1)
GLOBAL = dict(selection="global")
NEURONS = dict(neuron_beta2=0.9)


def fused(*splits, **arguments):
    """The arguments with the same blocks for every leaf."""
    return arguments | dict(weight_splits=splits)


# mesh, leaves (matrices, shape, partition, (reduction, output)), arguments
LAYOUTS = {
    "both axes": ((4, 2), [(9, (16, 24), ("a", "b"), KERNEL)], {}),
    "both axes, the other way round, exact": (
        *((4, 2), [(5, (32, 16), ("b", "a"), KERNEL)]),
        dict(select_axis="shorter", **GLOBAL),
    ),
    # Owners find exact slices by the order of the devices.
    "both axes, a tuple on one, exact": (
        (2, 2, 2),
        [(3, (16, 8), (("c", "a"), "b"), KERNEL)],
        GLOBAL,
    ),
    "replicas share": ((4, 2), [(5, (32, 16), ("b",), KERNEL)], {}),
    "replicas share, exact": ((4, 2), [(5, (32, 16), ("b",), KERNEL)], GLOBAL),
    "replicas all do the work": (
        *((4, 2), [(2, (16, 24), ("b",), KERNEL)]),
        dict(share_replicas=False),
    ),
    "replicated": ((4, 2), [(5, (32, 16), (), KERNEL)], {}),
    "a team of all devices": ((8,), [(1, (32, 4096), ("a",), KERNEL)], {}),
    "a team across replicas": ((4, 2), [(1, (32, 4096), ("a",), KERNEL)], {}),
    "whole ones and teams of three across replicas": (
        *((2, 3), [(8, (12, 48), ("b",), KERNEL)]),
        {},
    ),
    "experts": ((8,), [(1, (8, 12, 16), ("a",), (1, 2))], {}),
    "experts, sharded matrices, neurons": (
        *((4, 2), [(2, (4, 16, 8), ("a", None, "b"), (1, 2))]),
        NEURONS,
    ),
    "layers in the middle": ((8,), [(2, (16, 3, 24), ("a",), (0, 2))], {}),
    "heads in the reduction, exact, neurons": (
        *((2, 2, 2), [(2, (4, 16, 8), ("c", "a"), ((0, 2), 1))]),
        NEURONS | GLOBAL,
    ),
    "heads in the output, inner axis sharded, exact, rounds": (
        *((2, 2, 2), [(3, (16, 6, 8), ("a", "b", "c"), (0, (1, 2)))]),
        dict(score="l2", max_exchange_bytes=64, **GLOBAL),
    ),
    "neurons across the reduction's devices": (
        *((8,), [(3, (32, 24), ("a",), KERNEL)]),
        NEURONS,
    ),
    # Remainders of two groups in one slot: one of every 2 or 4 rows a device.
    "mixed slots": (
        *((8,), [(9, (16, 32), ("a",), KERNEL), (10, (32, 32), ("a",), KERNEL)]),
        {},
    ),
    # Pieces agree in size, not in shape: [1, 64] and [8, 8] a device.
    "mixed slots of transposed pieces": (
        *((8,), [(11, (16, 64), ("a",), KERNEL), (10, (256, 8), ("a",), KERNEL)]),
        {},
    ),
    "mixed teams of transposed pieces": (
        *((8,), [(1, (16, 64), ("a",), KERNEL), (1, (256, 8), ("a",), KERNEL)]),
        {},
    ),
    # [2, 24] and [3, 16] a device: blocks of 8 columns are tiles, if tiles have 8.
    "mixed slots of pieces with no common width": (
        *((8,), [(11, (64, 24), ("a",), KERNEL), (10, (96, 16), ("a",), KERNEL)]),
        {},
    ),
    "mixed slots of pieces with a common tile": (
        *((8,), [(9, (64, 24), ("a",), KERNEL), (11, (96, 16), ("a",), KERNEL)]),
        {},
    ),
    "mixed exact slots that send different numbers": (
        *((4,), [(1, (16, 8), ("a",), KERNEL), (3, (32, 4), ("a",), KERNEL)]),
        GLOBAL,
    ),
    "a lone exact tall submatrix": (
        *((8,), [(1, (64, 8), ("a",), KERNEL)]),
        GLOBAL,
    ),
    # 9 of 36 columns a device: no team cuts them evenly.
    "a lone tall submatrix of odd parts": (
        *((8,), [(1, (4, 288), (None, "a"), KERNEL)]),
        {},
    ),
    "fused, one device": ((1,), [(2, (12, 32), (), KERNEL)], fused(8, 20, 4)),
    "fused, reduction sharded": (
        (8,),
        [(3, (32, 24), ("a",), KERNEL)],
        fused(8, 12, 4),
    ),
    "fused, reduction sharded, exact": (
        *((4,), [(1, (16, 12), ("a",), KERNEL)]),
        fused(8, 4, **GLOBAL),
    ),
    "fused, both sharded, the reduction selected, exact": (
        *((4, 2), [(1, (16, 12), ("a", "b"), KERNEL)]),
        fused(8, 4, select_axis="reduction", **GLOBAL),
    ),
    "fused, reduction sharded, shorter of every block": (
        *((8,), [(2, (16, 40), ("a",), KERNEL)]),
        fused(24, 8, 8, select_axis="shorter"),
    ),
    "fused, output sharded": (
        *((4,), [(3, (16, 64), (None, "a"), KERNEL)]),
        fused(32, 16, 16),
    ),
    "fused, blocks cross the shards, exact": (
        *((8,), [(2, (12, 80), (None, "a"), KERNEL)]),
        fused(48, 16, 16, **GLOBAL),
    ),
    "fused, blocks cross the shards, neurons": (
        *((4,), [(2, (12, 40), (None, "a"), KERNEL)]),
        fused(24, 8, 8, **NEURONS),
    ),
    "fused, output sharded, neurons, exact": (
        *((4,), [(2, (12, 40), (None, "a"), KERNEL)]),
        fused(24, 8, 8, **NEURONS, **GLOBAL),
    ),
    "fused, output sharded, the reduction selected": (
        *((4, 2), [(3, (16, 40), ("b", "a"), KERNEL)]),
        fused(24, 8, 8, select_axis="reduction", score="l2"),
    ),
    # Owners cut the columns of one block out: no team splits them.
    "fused, output sharded by a tuple, the reduction selected": (
        *((4, 2), [(1, (16, 64), (None, ("b", "a")), KERNEL)]),
        fused(48, 8, 8, select_axis="reduction"),
    ),
    "fused, output sharded, both axes selected": (
        *((4, 2), [(1, (16, 40), ("b", "a"), KERNEL)]),
        fused(24, 8, 8, select_axis="shorter"),
    ),
    "fused heads of a stack": (
        *((2, 4), [(2, (2, 16, 16, 4), ("a", None, "b"), (1, (2, 3)))]),
        fused(32, 16, 16),
    ),
    "fused heads beside a sharded reduction": (
        *((2, 4), [(2, (16, 16, 4), ("a", "b"), (0, (1, 2)))]),
        fused(32, 16, 16),
    ),
}
OF_THE_ORACLE = ("selection", "select_axis", "score", "neuron_beta2")


def kinds_of_axes():
    """Every layout on Auto axes, every other one on Explicit axes as well."""
    for i, name in enumerate(LAYOUTS):
        yield name, "auto"
        if i % 2:
            yield name, "explicit"


def leaves_of(described) -> dict[str, tuple]:
    """(shape, spec, axes) of every leaf of a row of `LAYOUTS`."""
    return {
        f"{g}-{i}": (shape, spec, axes)
        for g, (count, shape, spec, axes) in enumerate(described)
        for i in range(count)
    }


@pytest.mark.parametrize("name, kind", [*kinds_of_axes()])
def test_layout_equals_the_oracle(name, kind, monkeypatch):
    if "common tile" in name:
        monkeypatch.setattr(_exchange, "LANES", 8)
    sizes, described, arguments = LAYOUTS[name]
    mesh = make_mesh(sizes, kind)
    leaves = leaves_of(described)
    rng = np.random.default_rng(0)
    raw = [
        {w: rng.normal(size=x[0]).astype(np.float32) for w, x in leaves.items()}
        for _ in range(2)
    ]
    grads = [{w: place(g[w], mesh, leaves[w][1]) for w in leaves} for g in raw]
    arguments = arguments | dict(
        ns_dtype=jnp.float32,
        weight_dimension_numbers={
            w: MuonDimensionNumbers(*axes) for w, (_, _, axes) in leaves.items()
        },
        param_shardings=needed_shardings(grads[0], kind),
    )
    tx = scale_by_dion2(0.25, 0.9, **arguments)
    count = place(np.zeros((), np.int32), mesh)  # as after a step: one compilation
    state = tx.init(grads[0])._replace(count=count)
    update = jax.jit(tx.update).lower(grads[0], state).compile()
    total = describe(grads[0], 0.25, **arguments).total
    assert_costs(collectives_in(update.as_text())[1], total)
    known = {k: v for k, v in arguments.items() if k in OF_THE_ORACLE}
    known["splits"] = arguments.get("weight_splits")
    expected = {w: None for w in leaves}
    for t, grad in enumerate(grads):
        updates, state = update(grad, state)
        for w, (shape, spec, (reduction, output)) in leaves.items():
            before = expected[w]
            expected[w] = now = reference_step(
                raw[t][w],
                before.mu if before else np.zeros(shape),
                nu=before.nu if before else None,
                reduction=reduction,
                output=output,
                shards=shards(mesh, spec, len(shape)),
                fraction=0.25,
                ef_decay=0.9,
                **known,
            )
            found = float64(updates[w])
            np.testing.assert_array_equal(found != 0, now.update != 0)
            assert frobenius(found, now.update) <= UPDATE
            assert relative(float64(state.mu[w]), now.mu) <= MOMENTUM
            if now.nu is not None:
                assert relative(float64(state.nu[w]), now.nu) <= UPDATE
            for x in (updates[w], state.mu[w]):
                assert x.sharding.is_equivalent_to(grad[w].sharding, x.ndim)
                assert_copies_agree(x)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if "mixed" in n or "team" in n])
def test_mixed_slots_and_teams_are_such(name):
    sizes, described, arguments = LAYOUTS[name]
    mesh = make_mesh(sizes, "auto")
    params = [
        jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )
        for count, shape, spec, _ in described
        for _ in range(count)
    ]
    given, options = read_settings(
        "describe", 0.25, arguments | dict(ns_dtype=jnp.float32)
    )
    layouts = resolve_layouts(
        *(params, MuonDimensionNumbers(*KERNEL), None, shardings_of(params)),
        *(given["select_axis"],),
        neurons=False,
    )
    dtypes = [x.dtype for x in params]
    ((_, plan),) = plans_by_mesh(layouts, dtypes, given, options)
    slots = [slot for exchange in plan.exchanges for slot in exchange.slots]
    assert "mixed" not in name or any(len(slot.segments) == 2 for slot in slots)
    assert "team" not in name or any(slot.team > 1 for slot in slots)


@pytest.mark.parametrize("kind", KINDS)
def test_ties_fall_by_index_where_an_inner_axis_is_sharded(kind):
    # All scores are equal. The output is (heads, head size): the first quarter of its
    # slices is one head, which lies on every device of axis b.
    mesh, shape, spec = make_mesh((2, 4), kind), (16, 4, 8), (None, "a", "b")
    raw = np.ones(shape, np.float32)
    grads = {"w": place(raw, mesh, spec)}
    tx = scale_by_dion2(
        *(0.25, 0.5),
        selection="global",
        weight_dimension_numbers=MuonDimensionNumbers(0, (1, 2)),
        param_shardings=needed_shardings(grads, kind),
    )
    _, state = jax.jit(tx.update)(grads, tx.init(grads))
    expected = reference_step(
        *(raw, np.zeros(shape)),
        reduction=0,
        output=(1, 2),
        shards=shards(mesh, spec, 3),
        ef_decay=0.5,
        selection="global",
    )
    assert (expected.mu[:, 0] == 0.5).all() and (expected.mu[:, 1:] == 1).all()
    np.testing.assert_array_equal(state.mu["w"], expected.mu)


def shards(mesh, spec, rank):
    """Shards along every axis."""
    entries = [(e,) if isinstance(e, str) else e or () for e in spec]
    counts = [int(np.prod([mesh.shape[n] for n in e])) for e in entries]
    return (*counts, *(1 for _ in range(rank - len(counts))))
