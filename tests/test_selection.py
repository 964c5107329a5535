"""Which slices are selected: exact counts, ties, and gather and scatter as inverses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dion2_jax._selection import (
    ascending,
    gather,
    random_scores,
    scatter,
    slice_count,
    slice_scores,
    top_slices,
)

COUNTS = [
    # fraction, n, k: max(1, ceil(fraction n)) in Python floats, at most n
    (0.25, 64, 16),
    (0.25, 10, 3),
    (0.01, 24, 1),
    (0.1, 33, 4),
    (0.1, 30, 3),
    (0.07, 100, 8),  # 0.07 * 100 is 7.000000000000001
    (1.0, 7, 7),
    (0.5, 1, 1),
    (0.25, 0, 0),
]


@pytest.mark.parametrize("fraction, n, k", COUNTS)
def test_slice_count(fraction, n, k):
    assert slice_count(fraction, n) == k


def test_ties_go_to_the_lower_index():
    scores = jnp.asarray([[1.0, 3, 3, 1, 3], [2, 2, 2, 2, 2]])
    assert top_slices(scores, 2).tolist() == [[1, 2], [0, 1]]
    assert top_slices(scores, 4)[0].tolist() == [1, 2, 4, 0]


def test_scores_are_norms_over_the_other_axis():
    x = jnp.asarray([[3.0, -4], [0, 0], [-1, 0]])
    assert slice_scores(x, (1,), "l1").tolist() == [7, 0, 1]
    assert slice_scores(x, (1,), "l2").tolist() == [5, 0, 1]
    assert slice_scores(x, (0,), "l1").tolist() == [4, 4]
    # The squares of these are not float32.
    assert slice_scores(x * 2.0**100, (1,), "l2").tolist() == [
        5 * 2.0**100,
        0,
        2.0**100,
    ]
    assert slice_scores(x.astype(jnp.bfloat16), (1,), "l1").dtype == jnp.float32


def test_random_scores_follow_seed_step_and_leaf():
    draw = lambda seed, count, leaf: np.asarray(  # noqa: E731
        random_scores(seed, count, (leaf, 0), (2, 5))
    )
    assert (draw(0, 1, 2) == draw(0, jnp.int32(1), 2)).all()
    for key in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        assert (draw(0, 1, 2) != draw(*key)).any()


def test_ascending_lists_the_true_entries_and_says_which_are_real():
    mask = jnp.asarray([[False, True, False, True], [True, True, True, True]])
    index, valid = ascending(mask, 3)
    assert index[0, :2].tolist() == [1, 3] and index[1].tolist() == [0, 1, 2]
    assert valid.tolist() == [[True, True, False], [True, True, True]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scatter_puts_back_what_gather_took(dtype):
    x = jax.random.normal(jax.random.key(0), (2, 5, 3)).astype(dtype)
    index = jnp.asarray([[4, 1], [0, 3]])
    picked = gather(x, index, None)
    assert (
        picked == jnp.stack([x[0, jnp.array([4, 1])], x[1, jnp.array([0, 3])]])
    ).all()
    dense = scatter(picked, index, None, 5)
    assert dense.dtype == dtype
    kept = jnp.zeros((2, 5), bool).at[jnp.arange(2)[:, None], index].set(True)
    assert (dense == jnp.where(kept[:, :, None], x, 0)).all()
    assert (gather(dense, index, None) == picked).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_slices_that_are_not_valid_stay_zero(dtype):
    x = jnp.arange(1.0, 13).reshape(1, 4, 3).astype(dtype)
    index, valid = jnp.asarray([[2, 0]]), jnp.asarray([[True, False]])
    picked = gather(x, index, valid)
    assert picked.tolist() == [[[7, 8, 9], [0, 0, 0]]]
    dense = scatter(jnp.ones((1, 2, 3)), index, valid, 4)
    assert dense[0].sum(1).tolist() == [0, 0, 3, 0]
