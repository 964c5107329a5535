"""Fused weights: every block as if it were a parameter of its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import KINDS, UPDATE, frobenius, make_mesh, needed_shardings, place
from optax.contrib import MuonDimensionNumbers

from dion2_jax import describe, dion2, dion3, scale_by_dion2

SIZES = (24, 8, 8)

# mesh, partition, optimizer, arguments
CASES = {
    "reduction sharded": ((8,), ("a",), dion2, {}),
    "output sharded": ((8,), (None, "a"), dion2, dict(adjust_lr="rms_norm")),
    "both sharded": ((4, 2), ("a", "b"), dion2, dict(select_axis="shorter")),
    "neurons": ((4,), (None, "a"), dion3, dict(adjust_fraction=True)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_case_17_a_fused_weight_is_its_blocks(name, kind):
    sizes, spec, optimizer, arguments = CASES[name]
    mesh = make_mesh(sizes, kind)
    rng = np.random.default_rng(0)
    raw = [rng.normal(size=(16, 40)).astype(np.float32) for _ in range(3)]
    borders = np.cumsum(SIZES)[:-1]

    def parts(x):
        return [place(part, mesh, spec) for part in np.split(x, borders, axis=1)]

    def step(params, grads, splits):
        tx = optimizer(
            *(0.1, 0.25, 0.9),
            ns_dtype=jnp.float32,
            weight_splits=splits,
            param_shardings=needed_shardings(params, kind),
            **arguments,
        )
        state = tx.init(params)
        update = jax.jit(tx.update)
        for grad in grads:
            updates, state = update(grad, state, params)
        return updates

    whole = step(
        {"qkv": place(raw[0], mesh, spec)},
        [{"qkv": place(g, mesh, spec)} for g in raw[1:]],
        {"qkv": SIZES},
    )["qkv"]
    alone = step(parts(raw[0]), [parts(g) for g in raw[1:]], None)
    for found, expected in zip(
        np.split(np.asarray(whole), borders, axis=1), alone, strict=True
    ):
        assert frobenius(found, np.asarray(expected)) <= UPDATE


def test_a_bad_gradient_touches_its_block_alone():
    mesh = make_mesh((8,), "auto")
    grad = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    grad[3, 5] = np.nan  # of the first of two blocks that no device border divides
    grads = {"gate_up": place(grad, mesh, (None, "a"))}
    tx = scale_by_dion2(
        weight_splits=(16, 16), param_shardings=needed_shardings(grads, "auto")
    )
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    for x in (updates["gate_up"], state.mu["gate_up"]):
        assert np.isnan(np.asarray(x)[:, :16]).any()
        assert np.isfinite(np.asarray(x)[:, 16:]).all()
    assert np.asarray(updates["gate_up"])[:, 16:].any()


def test_random_scores_differ_between_blocks_selected_by_the_reduction():
    grads = {"w": jnp.ones((64, 32))}
    tx = scale_by_dion2(score="random", weight_splits=(16, 16), select_axis="reduction")
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    rows = [np.asarray(updates["w"])[:, cut].any(1) for cut in np.s_[:16, 16:]]
    assert [row.sum() for row in rows] == [16, 16]
    assert (rows[0] != rows[1]).any()


def test_describe_tells_the_blocks():
    (row,) = describe({"w": jnp.ones((64, 40))}, weight_splits=SIZES).rows
    assert row.selects == "6 of 24 output; 2 of 8 output, 2x"


@pytest.mark.parametrize(
    "shape, spec, numbers, splits, words",
    [
        ((16, 40), (), (0, 1), (24, 8), ["sum to its output size, 40", "32"]),
        ((16, 40), (), (0, 1), (44, -4), ["positive"]),
        ((16, 40), (None, "a"), (0, 1), (20, 12, 8), ["multiple of 8", "(24, 16, 8)"]),
        ((16, 8, 4), (None, "a"), (0, (1, 2)), (20, 12), ["multiple of 32"]),
        ((16, 4, 8), (None, None, "a"), (0, (1, 2)), (16, 16), ["first axis only"]),
    ],
)
def test_case_17_blocks_that_cannot_be_had_say_which_could(
    shape, spec, numbers, splits, words
):
    grads = {"qkv": place(np.ones(shape), make_mesh((8,), "explicit"), spec)}
    tx = scale_by_dion2(
        weight_splits={"qkv": splits},
        weight_dimension_numbers=MuonDimensionNumbers(*numbers),
    )
    with pytest.raises(
        ValueError, match=re.escape(f"weight_splits {splits}")
    ) as caught:
        tx.init(grads)
    assert all(word in str(caught.value) for word in ["'qkv'", *words]), caught.value


def test_splits_of_the_wrong_kind_name_the_leaf():
    params = {"w": jnp.ones((16, 40)), "bias": jnp.ones(40)}
    with pytest.raises(TypeError, match=r"weight_splits.*'w'.*tuple of ints"):
        dion2(0.1, weight_splits={"w": 40, "bias": None}).init(params)
    with pytest.raises(ValueError, match=r"weight_splits.*'bias'.*AdamW"):
        dion2(0.1, weight_splits=SIZES).init(params)
