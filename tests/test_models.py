"""Published models under the meshes people train them on.

model_layouts.json lists shapes, axes and partitions of their parameters. `describe`
takes them at full size; scaled down to eight devices one step equals the oracle.
"""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    MOMENTUM,
    UPDATE,
    assert_costs,
    collectives_in,
    float64,
    frobenius,
    place,
    relative,
)
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from reference import step as reference_step

from dion2_jax import describe, scale_by_dion2, shardings_of

MODELS = json.loads((Path(__file__).parent / "model_layouts.json").read_text())
NAMES = [f"{m['model']}-{'-'.join(map(str, m['mesh'].values()))}" for m in MODELS]
PAIRS = list(enumerate(MODELS))


def spec_of(leaf):
    return P(*(tuple(e) if isinstance(e, list) else e for e in leaf["spec"]))


def dimensions(leaf):
    if leaf["reduction"] is None:
        return None
    return MuonDimensionNumbers(tuple(leaf["reduction"]), tuple(leaf["output"]))


@pytest.mark.parametrize("selection", ["local", "global"])
@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_describe_takes_the_whole_model(model, selection):
    sizes = model["mesh"]
    mesh = AbstractMesh(
        *(tuple(sizes.values()), tuple(sizes)),
        axis_types=(AxisType.Auto,) * len(sizes),
    )
    params = {
        leaf["path"]: jax.ShapeDtypeStruct(
            tuple(leaf["shape"]),
            jnp.bfloat16,
            sharding=NamedSharding(mesh, spec_of(leaf)),
        )
        for leaf in model["leaves"]
    }
    axes = {leaf["path"]: dimensions(leaf) for leaf in model["leaves"]}
    found = describe(params, selection=selection, weight_dimension_numbers=axes)
    assert all(len(line) <= 120 for line in str(found).splitlines())
    assert {r.path: r.taken_by for r in found.rows} == {
        path: "dion2" if entry else "adamw" for path, entry in axes.items()
    }
    for kind in ("all_to_all", "all_reduce", "all_gather", "operations"):
        total = sum(getattr(row.cost, kind) for row in found.rows)
        assert total == pytest.approx(getattr(found.total, kind))
    # Every matrix is orthogonalized once, by someone: 20 r r c and more of each.
    least = sum(
        20 * min(a, b) ** 2 * max(a, b) * 0.25**2 * math.prod(leaf["shape"]) / (a * b)
        for leaf in model["leaves"]
        if leaf["reduction"]
        for a, b in [
            [
                math.prod(leaf["shape"][i] for i in leaf[g])
                for g in ("reduction", "output")
            ]
        ]
    )
    assert found.total.operations * math.prod(sizes.values()) > least / 4


def scaled(model):
    """Mesh sizes of eight devices, and the leaves of two layers with small shapes."""
    names = sorted(model["mesh"], key=lambda a: -model["mesh"][a])
    sizes = dict(zip(names, {1: (8,), 2: (4, 2)}.get(len(names), (2, 2, 2, 1))))
    sizes = {a: sizes[a] for a in model["mesh"]}
    leaves = [
        leaf
        for leaf in model["leaves"]
        if leaf["reduction"] and not any(f"_{i}/" in leaf["path"] for i in range(2, 99))
    ]
    distinct = sorted({n for leaf in leaves for n in leaf["shape"]})
    for leaf in leaves:
        matrix = {*leaf["reduction"], *leaf["output"]}
        entries = [(e,) if isinstance(e, str) else e or () for e in leaf["spec"]]
        shards = [math.prod(sizes[a] for a in e) for e in entries]
        yield (
            leaf,
            # Equal sizes stay equal, and larger ones larger; batch axes are short.
            tuple(
                8 * (1 + distinct.index(n)) if axis in matrix else max(p, 2)
                for axis, (n, p) in enumerate(zip(leaf["shape"], shards, strict=True))
            ),
            shards,
            sizes,
        )


@pytest.mark.parametrize("number, model", PAIRS, ids=NAMES)
def test_one_step_of_the_scaled_model_equals_the_oracle(number, model):
    rows = list(scaled(model))
    sizes = rows[0][3]
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    rng = np.random.default_rng(0)
    raw = {
        leaf["path"]: rng.normal(size=shape).astype(np.float32)
        for leaf, shape, _, _ in rows
    }
    grads = {
        leaf["path"]: place(raw[leaf["path"]], mesh, spec_of(leaf))
        for leaf, _, _, _ in rows
    }
    chosen = dict(selection=("local", "global")[number % 2])
    arguments = dict(
        ns_dtype=jnp.float32,
        weight_dimension_numbers={r[0]["path"]: dimensions(r[0]) for r in rows},
        param_shardings=shardings_of(grads),
        **chosen,
    )
    tx = scale_by_dion2(0.25, 0.9, **arguments)
    state = tx.init(grads)
    update = jax.jit(tx.update).lower(grads, state).compile()
    total = describe(grads, 0.25, **arguments).total
    assert_costs(collectives_in(update.as_text())[1], total)
    updates, state = update(grads, state)
    for leaf, shape, shards, _ in rows:
        w = leaf["path"]
        expected = reference_step(
            raw[w],
            np.zeros(shape),
            reduction=tuple(leaf["reduction"]),
            output=tuple(leaf["output"]),
            shards=shards,
            fraction=0.25,
            ef_decay=0.9,
            **chosen,
        )
        found = float64(updates[w])
        np.testing.assert_array_equal(found != 0, expected.update != 0)
        assert frobenius(found, expected.update) <= UPDATE
        assert relative(float64(state.mu[w]), expected.mu) <= MOMENTUM
