"""Pieces of several slots travel in one array, and come out of it as they went in."""

import jax.numpy as jnp
import numpy as np
import pytest

from dion2_jax._exchange import _cut, _join

# (repeat, k, c) of every slot, and the shape of what a device sends another.
SEAMS = {
    "one slot": ([(2, 3, 8)], (2, 3, 8)),
    "rows line up": ([(2, 6, 4), (3, 2, 4)], (18, 4)),
    "one is twice as wide": ([(2, 3, 8), (3, 3, 4)], (21, 4)),
    "widths have a divisor": ([(2, 3, 8), (1, 2, 12)], (18, 4)),
    "widths have none": ([(2, 3, 8), (3, 2, 3)], (66, 1)),
}


@pytest.mark.parametrize("name", SEAMS)
def test_what_is_joined_is_cut_again(name):
    shapes, sent = SEAMS[name]
    rng = np.random.default_rng(0)
    pieces = [jnp.asarray(rng.normal(size=(5, *s)), jnp.float32) for s in shapes]
    buffer = _join(pieces)
    assert buffer.shape == (5, *sent)
    # In any order of devices: what is for one of them lies in its row.
    order = np.array([3, 1, 4, 0, 2])
    for found, piece in zip(_cut(buffer[order], shapes), pieces, strict=True):
        np.testing.assert_array_equal(found, piece[order])
